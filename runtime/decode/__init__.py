"""What every decoding loop works with: rows, the context of a request, prompts, the cost of calls."""

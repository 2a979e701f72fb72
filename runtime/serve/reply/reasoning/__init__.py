"""How families of models write what they think before an answer, a file for each: `FAMILY`."""

// What onnxruntime calls when it loads the library: the operators of the domain "accel".
#include "abi.h"

abi::Op attention_op(bool coded);
abi::Op attention_groups_op(bool all);
abi::Op attention_halves_op();
abi::Op attention_table_op();
abi::Op best_pages_op();
abi::Op best_tokens_op();
abi::Op columns_op();
abi::Op decode_op();
abi::Op decode_groups_op();
abi::Op decode_halves_op();
abi::Op drawn_attention_halves_op();
abi::Op drawn_attention_op(bool coded);
abi::Op encode_halves_op();
abi::Op encode_op();
abi::Op fetch_pages_op(bool coded);
abi::Op head_votes_op();
abi::Op key_products_op(bool coded);
abi::Op linear_op();
abi::Op look_up_op();
abi::Op page_bounds_op();
abi::Op page_range_op(bool coded);
abi::Op place_halves_op();
abi::Op place_op(bool coded);
abi::Op units_seen_op();

extern "C" __attribute__((visibility("default"))) abi::Status* RegisterCustomOps(
    abi::Options* options, const abi::Base* base) {
  const void* const* table = base->get_api(abi::kVersion);
  if (!table) return nullptr;  // an onnxruntime before 1.17: the graph that needs the operators fails to load
  static const abi::Op ops[] = {attention_op(false),
                                attention_op(true),
                                attention_groups_op(false),
                                attention_groups_op(true),
                                attention_halves_op(),
                                attention_table_op(),
                                best_pages_op(),
                                best_tokens_op(),
                                columns_op(),
                                decode_op(),
                                decode_groups_op(),
                                decode_halves_op(),
                                drawn_attention_halves_op(),
                                drawn_attention_op(false),
                                drawn_attention_op(true),
                                encode_halves_op(),
                                encode_op(),
                                fetch_pages_op(false),
                                fetch_pages_op(true),
                                head_votes_op(),
                                key_products_op(false),
                                key_products_op(true),
                                linear_op(),
                                look_up_op(),
                                page_bounds_op(),
                                page_range_op(false),
                                page_range_op(true),
                                place_halves_op(),
                                place_op(false),
                                place_op(true),
                                units_seen_op()};
  static abi::Domain* domain = nullptr;
  abi::Api api{table};
  if (!domain) {
    if (abi::Status* s = api.create_domain("accel", &domain)) return s;
    for (const abi::Op& op : ops)
      if (abi::Status* s = api.add_op(domain, &op)) return s;
  }
  return api.add_domain(options, domain);
}

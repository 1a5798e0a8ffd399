// Attention of new tokens over keys and values in a paged cache: y = softmax(q k^T / sqrt(d)) v, with a fixed order.
//
// Keys are walked in tiles of KEY_TILE, anchored at position 0 of the sequence; tiles are summed within splits of
// SPLIT_TILES, anchored likewise, with a running maximum (https://arxiv.org/abs/1805.02867), and splits are merged in
// order. A tile is always computed whole; keys that a query does not see have weight 0. So a query's result depends on
// itself and on the keys and values that it sees: not on the queries beside it, the threads, or what is beyond.
//
//     keys     |-- tile --|-- tile --|-- ... --|-- tile --|-- tile --|      (shared by all queries of an item)
//     splits   |------------- split -----------|------ split --------|
//     rows     query heads of one KV head, for each of the item's tokens: the arithmetic of a row is always the same
//
// Query head h reads KV head h / (num_heads / num_kv_heads) (https://arxiv.org/abs/2305.13245). Plain C interface.

#include <cstdlib>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "attention_worker.h"

namespace {

constexpr int QUERY_ROWS = 192;          // rows that share a tile's packed keys and values
constexpr int64_t SERIAL_WORK = 500000;  // multiplications below which waking threads costs more than they save

#ifdef _OPENMP
int thread_index() { return omp_get_thread_num(); }
#else
int thread_index() { return 0; }
#endif

void* allocate(int64_t bytes) { return aligned_alloc(64, ceil_div(bytes + 1, 64) * 64); }

// Lists the items of a step. `apart`: one for each split, and in `merges` what puts them together.
template <class Stored>
void list_items(const Layer<Stored>& layer, int64_t item_tokens, bool apart, Item* items, int64_t& num_items,
                Item* merges, int64_t& num_merges, int64_t& partial_rows) {
  const AttentionStep& step = *layer.step;
  const int64_t group = step.num_heads / step.num_kv_heads;
  for (int64_t seq = 0; seq < step.num_seqs; seq++) {
    int64_t start = step.query_start[seq], end = step.query_start[seq + 1];
    // From the end, where most keys are seen: the largest items come first.
    for (int64_t first = start + (end - start - 1) / item_tokens * item_tokens; first >= start; first -= item_tokens) {
      int64_t position = step.context_lens[seq] - (end - first), tokens = smaller(item_tokens, end - first);
      int64_t low = layer.window ? larger(0, position - layer.window + 1) / SPLIT_KEYS : 0;
      int64_t num_splits = (position + tokens - 1) / SPLIT_KEYS + 1 - low;
      for (int64_t kv_head = 0; kv_head < step.num_kv_heads; kv_head++) {
        Item item = {seq, kv_head, first, tokens, low, num_splits, -1};
        if (!apart || num_splits == 1) {
          items[num_items++] = item;
          continue;
        }
        item.first_partial = partial_rows;
        merges[num_merges++] = item;
        item.num_splits = 1;
        for (int64_t split = 0; split < num_splits; split++) {
          items[num_items++] = item;
          item.first_split++;
          item.first_partial += tokens * group;
        }
        partial_rows = item.first_partial;
      }
    }
  }
}

// Returns 0, or 1 if there is no memory.
template <class Stored, class Words>
int attend_all(const Layer<Stored>& layer) {
  const AttentionStep& step = *layer.step;
  const int64_t group = step.num_heads / step.num_kv_heads;
  int64_t item_tokens = 1, most_items = 0, most_parts = 0, work = 0;
  for (int64_t seq = 0; seq < step.num_seqs; seq++)
    item_tokens = larger(item_tokens, step.query_start[seq + 1] - step.query_start[seq]);
  item_tokens = smaller(item_tokens, larger(1, QUERY_ROWS / group));
  for (int64_t seq = 0; seq < step.num_seqs; seq++) {
    int64_t queries = step.query_start[seq + 1] - step.query_start[seq], context = step.context_lens[seq];
    int64_t items = ceil_div(queries, item_tokens) * step.num_kv_heads;
    most_items += items;
    most_parts += items * ceil_div(context, SPLIT_KEYS);
    work += queries * step.num_heads * step.head_dim * (layer.window ? smaller(context, layer.window) : context);
  }
  const int threads = work < SERIAL_WORK ? 1 : static_cast<int>(step.num_threads);
  // Splits are computed apart where there would be too few items to share out; that changes no bit.
  const bool apart = most_items < 4 * threads && threads > 1;
  const int64_t row_floats = Worker<Stored, Words>::partial_size(step);
  const int64_t thread_floats = ceil_div(Worker<Stored, Words>::memory_floats(step, item_tokens), LANES) * LANES;
  int64_t num_items = 0, num_merges = 0, partial_rows = 0;
  Item* items = static_cast<Item*>(allocate((most_parts + most_items) * sizeof(Item)));
  Item* merges = items + most_parts;
  if (items) list_items(layer, item_tokens, apart, items, num_items, merges, num_merges, partial_rows);
  float* memory = static_cast<float*>(allocate((thread_floats * threads + partial_rows * row_floats) * sizeof(float)));
  if (items && memory) {
    float* partials = memory + thread_floats * threads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      Worker<Stored, Words> worker(layer, item_tokens, memory + thread_index() * thread_floats);
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < num_items; i++) worker.run(items[i], partials);
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < num_merges; i++) worker.merge_partials(merges[i], partials);
    }
  }
  const int failed = !items || !memory;
  free(items);
  free(memory);
  return failed;
}

}  // namespace

extern "C" {

// Which instructions were compiled in; part of what the bits depend on.
const char* headrace_instructions() {
#if defined(__AVX512BF16__)
  return "avx512bf16";
#elif defined(__AVX512F__)
  return "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
  return "avx2";
#else
  return "generic";
#endif
}

// queries [num_tokens, num_heads, head_dim], `query_stride` numbers from token to token; keys and values [num_blocks,
// num_kv_heads, block_size, head_dim]; output [num_tokens, num_heads, head_dim]. Returns 0, or 1 if there is no memory.
int headrace_attention_float32(const AttentionStep* step, const float* queries, int64_t query_stride,
                               const float* keys, const float* values, float* output, int64_t window) {
  return attend_all<float, FloatWords>({step, queries, keys, values, output, query_stride, window});
}

int headrace_attention_bfloat16(const AttentionStep* step, const uint16_t* queries, int64_t query_stride,
                                const uint16_t* keys, const uint16_t* values, uint16_t* output, int64_t window) {
#if defined(__AVX512BF16__)
  return attend_all<uint16_t, PairWords>({step, queries, keys, values, output, query_stride, window});
#else
  return attend_all<uint16_t, FloatWords>({step, queries, keys, values, output, query_stride, window});
#endif
}
}

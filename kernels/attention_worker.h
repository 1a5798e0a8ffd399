// One thread's work: the attention of some tokens of one sequence, for the query heads of one KV head.
#pragma once

#include "products.h"

// One step's facts; the same for every layer. Mirrored by `_Step` in native_kernels.py.
struct AttentionStep {
  const int32_t* query_start;   // [num_seqs + 1]
  const int32_t* context_lens;  // [num_seqs]
  const int32_t* block_tables;  // [num_seqs, table_stride]
  int64_t num_seqs, table_stride;
  int64_t num_heads, num_kv_heads, head_dim, block_size;
  int64_t num_threads;
};

namespace {

constexpr int SPLIT_TILES = 16;
constexpr int64_t SPLIT_KEYS = KEY_TILE * SPLIT_TILES;
const float LOWEST = -INFINITY;

// Some consecutive new tokens of one sequence, for one KV head; and the splits of its keys.
struct Item {
  int64_t seq, kv_head, first_token, num_tokens, first_split, num_splits;
  int64_t first_partial;  // row of the partial results, or -1 if all splits are merged at once
};

template <class Stored>
struct Layer {
  const AttentionStep* step;
  const Stored *queries, *keys, *values;
  Stored* output;
  int64_t query_stride;  // numbers from one token's queries to the next
  int64_t window;        // keys that a query sees, itself included; 0: all
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Working memory of one thread for one item. `State` is what the rows have summed up so far.
struct State {
  float *highest, *weight_sums, *sums;  // [rows], [rows, LANES], [rows, dims]
};

template <class Stored, class Words>
class Worker {
 public:
  Worker(const Layer<Stored>& layer, int64_t most_tokens, float* memory)
      : layer_(layer),
        step_(*layer.step),
        group_(step_.num_heads / step_.num_kv_heads),
        words_(words_of(step_)),
        dims_(dims_of(step_)) {
    int64_t rows = most_tokens * group_;
    auto take = [&](int64_t n) {
      float* part = memory;
      memory += n;
      return part;
    };
    auto take_words = [&](int64_t n) { return reinterpret_cast<uint32_t*>(take(n)); };
    queries_ = take_words(rows * words_);
    staged_ = take_words(KEY_TILE * words_);
    keys_ = take_words(KEY_TILE * words_);
    values_ = take_words(KEY_TILE * dims_);
    weights_ = take_words(MOST_ROWS * KEY_TILE);
    scores_ = take(MOST_ROWS * KEY_TILE);
    split_ = {take(rows), take(rows * LANES), take(rows * dims_)};
    total_ = {take(rows), take(rows * LANES), take(rows * dims_)};
  }

  static int64_t memory_floats(const AttentionStep& step, int64_t most_tokens) {
    int64_t rows = most_tokens * (step.num_heads / step.num_kv_heads), words = words_of(step), dims = dims_of(step);
    return rows * words + KEY_TILE * (2 * words + dims + 2 * MOST_ROWS) + 2 * rows * (1 + LANES + dims);
  }
  // Floats of one row's partial result: highest score, sums of weights, sums.
  static int64_t partial_size(const AttentionStep& step) { return 1 + LANES + dims_of(step); }

  void run(const Item& item, float* partials) {
    begin(item);
    if (item.first_partial >= 0) {
      sum_split(item.first_split);
      for (int64_t row = 0; row < rows_; row++) {
        float* partial = partials + (item.first_partial + row) * partial_size(step_);
        partial[0] = split_.highest[row];
        memcpy(partial + 1, split_.weight_sums + row * LANES, LANES * sizeof(float));
        memcpy(partial + 1 + LANES, split_.sums + row * dims_, dims_ * sizeof(float));
      }
      return;
    }
    clear(total_);
    for (int64_t split = item.first_split; split < item.first_split + item.num_splits; split++) {
      sum_split(split);
      for (int64_t row = 0; row < rows_; row++)
        merge(row, split_.highest[row], split_.weight_sums + row * LANES, split_.sums + row * dims_);
    }
    finish();
  }

  // Merges the partial results of an item's splits, which lie one after the other.
  void merge_partials(const Item& item, const float* partials) {
    begin(item);
    clear(total_);
    for (int64_t split = 0; split < item.num_splits; split++)
      for (int64_t row = 0; row < rows_; row++) {
        const float* partial = partials + (item.first_partial + split * rows_ + row) * partial_size(step_);
        merge(row, partial[0], partial + 1, partial + 1 + LANES);
      }
    finish();
  }

 private:
  static int64_t words_of(const AttentionStep& step) {
    return ceil_div(ceil_div(step.head_dim, Words::PER_WORD), LANES) * LANES;
  }
  static int64_t dims_of(const AttentionStep& step) { return ceil_div(step.head_dim, LANES) * LANES; }

  void begin(const Item& item) {
    item_ = item;
    rows_ = item.num_tokens * group_;
    int64_t query_end = step_.query_start[item.seq + 1];
    first_position_ = step_.context_lens[item.seq] - (query_end - item.first_token);
    last_position_ = first_position_ + item.num_tokens - 1;
    memset(queries_, 0, rows_ * words_ * sizeof(uint32_t));
    for (int64_t row = 0; row < rows_; row++) {
      const Stored* query = layer_.queries + (item.first_token + row / group_) * layer_.query_stride +
                            (item.kv_head * group_ + row % group_) * step_.head_dim;
      put_words(queries_ + row * words_, query);
    }
  }

  void put_words(uint32_t* words, const Stored* stored) {
    if constexpr (Words::PER_WORD == 2)
      memcpy(words, stored, step_.head_dim * sizeof(Stored));
    else
      fetch(reinterpret_cast<float*>(words), stored, step_.head_dim);
  }

  void clear(State& state) {
    for (int64_t row = 0; row < rows_; row++) state.highest[row] = LOWEST;
    memset(state.weight_sums, 0, rows_ * LANES * sizeof(float));
    memset(state.sums, 0, rows_ * dims_ * sizeof(float));
  }

  int64_t first_seen(int64_t position) const { return layer_.window ? larger(0, position - layer_.window + 1) : 0; }

  void sum_split(int64_t split) {
    clear(split_);
    int64_t first = larger(split * SPLIT_TILES, first_seen(first_position_) / KEY_TILE);
    int64_t end = smaller((split + 1) * SPLIT_TILES, last_position_ / KEY_TILE + 1);
    for (int64_t tile = first; tile < end; tile++) {
      pack(tile * KEY_TILE);
      for (int64_t row = 0; row < rows_; row += MOST_ROWS)
        attend(row, static_cast<int>(smaller(MOST_ROWS, rows_ - row)), tile * KEY_TILE);
    }
  }

  // Lays a tile's keys out as [words][KEY_TILE] and its values as [KEY_TILE / PER_WORD][dims]. What no query of the
  // item sees is never read and stands as zero.
  void pack(int64_t tile_start) {
    int64_t low = larger(first_seen(first_position_) - tile_start, 0);
    int64_t high = smaller(last_position_ + 1 - tile_start, KEY_TILE);
    const uint32_t* rows[KEY_TILE];
    const Stored* values[KEY_TILE];
    bool whole_words = step_.head_dim % (LANES * Words::PER_WORD) == 0 && sizeof(Stored) * Words::PER_WORD == 4;
    if (!whole_words || high - low < KEY_TILE) memset(staged_, 0, KEY_TILE * words_ * sizeof(uint32_t));
    for (int64_t key = 0; key < KEY_TILE; key++) {
      rows[key] = staged_ + key * words_;
      values[key] = nullptr;
    }
    const int32_t* table = step_.block_tables + item_.seq * step_.table_stride;
    int64_t page = (tile_start + low) / step_.block_size, offset = (tile_start + low) % step_.block_size;
    for (int64_t key = low; key < high; page++, offset = 0) {
      int64_t block = table[page];
      int64_t at = ((block * step_.num_kv_heads + item_.kv_head) * step_.block_size + offset) * step_.head_dim;
      for (; offset < step_.block_size && key < high; offset++, key++, at += step_.head_dim) {
        values[key] = layer_.values + at;
        if (whole_words)
          rows[key] = reinterpret_cast<const uint32_t*>(layer_.keys + at);
        else
          put_words(staged_ + key * words_, layer_.keys + at);
      }
    }
    for (int64_t key = 0; key < KEY_TILE; key += LANES)
      for (int64_t word = 0; word < words_; word += LANES)
        transpose(rows + key, word, keys_ + word * KEY_TILE + key, KEY_TILE);
    pack_values(values);
  }

  void pack_values(const Stored* const* values) {
    if constexpr (Words::PER_WORD == 1) {
      for (int64_t key = 0; key < KEY_TILE; key++) {
        float* row = reinterpret_cast<float*>(values_) + key * dims_;
        if (!values[key] || dims_ != step_.head_dim) memset(row, 0, dims_ * sizeof(float));
        if (values[key]) fetch(row, values[key], step_.head_dim);
      }
    } else {
      for (int64_t key = 0; key < KEY_TILE; key += 2)
        pack_pair(values[key], values[key + 1], values_ + key / 2 * dims_);
    }
  }

  // words[dim] = (low[dim], high[dim]), a missing row as zeros.
  void pack_pair(const Stored* low, const Stored* high, uint32_t* words) {
    int64_t dim = 0;
#if defined(__AVX512BF16__)
    if constexpr (Words::PER_WORD == 2)
      for (; dim + LANES <= step_.head_dim; dim += LANES) {
        auto sixteen = [dim](const uint16_t* row) {
          return row ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + dim)) : _mm256_setzero_si256();
        };
        __m512i a = _mm512_cvtepu16_epi32(sixteen(low)), b = _mm512_cvtepu16_epi32(sixteen(high));
        _mm512_storeu_si512(words + dim, _mm512_or_si512(a, _mm512_slli_epi32(b, 16)));
      }
#endif
    for (; dim < dims_; dim++) {
      uint32_t a = low && dim < step_.head_dim ? static_cast<uint32_t>(low[dim]) : 0;
      uint32_t b = high && dim < step_.head_dim ? static_cast<uint32_t>(high[dim]) : 0;
      words[dim] = a | b << 16;
    }
  }

  // Adds a tile to what `rows` rows from `first` on have summed up. For a row that sees nothing of it, nothing changes.
  void attend(int64_t first, int rows, int64_t tile_start) {
    if (tile_start > first_position_ + (first + rows - 1) / group_) return;
    if (tile_start + KEY_TILE <= first_seen(first_position_ + first / group_)) return;
    product<Words>(rows, queries_ + first * words_, words_, keys_, KEY_TILE, words_, scores_, KEY_TILE, nullptr,
                   TILE_COLUMNS);
    float kept[MOST_ROWS];
    for (int r = 0; r < rows; r++)
      kept[r] = weigh(first + r, scores_ + r * KEY_TILE, weights_ + r * KEY_TILE, tile_start);
    product<Words>(rows, weights_, KEY_TILE, values_, dims_, KEY_TILE / Words::PER_WORD, split_.sums + first * dims_,
                   dims_, kept, dims_ / LANES);
  }

  // Turns a row's scores into weights relative to the highest score so far; returns the factor of what was summed.
  float weigh(int64_t row, float* scores, uint32_t* weights, int64_t tile_start) {
    int64_t position = first_position_ + row / group_;
    int64_t low = first_seen(position) - tile_start, high = position + 1 - tile_start;
    if (low > 0 || high < KEY_TILE)
      for (int64_t key = 0; key < KEY_TILE; key++)
        if (key < low || key >= high) scores[key] = LOWEST;
    const Floats scale = all(scale_);
    Floats scaled[TILE_COLUMNS];
    for (int i = 0; i < TILE_COLUMNS; i++) scaled[i] = load(scores + i * LANES) * scale;
    float highest = lane_maximum(maximum(maximum(scaled[0], scaled[1]), maximum(scaled[2], scaled[3])));
    if (highest < split_.highest[row]) highest = split_.highest[row];
    float reference = highest == LOWEST ? 0.0f : highest;  // all scores -inf: no weight, rather than inf - inf
    for (int i = 0; i < TILE_COLUMNS; i++) scaled[i] = power_of_two(scaled[i] - all(reference));
    float kept = power_of_two_of(split_.highest[row] - reference);
    split_.highest[row] = highest;
    float* sum = split_.weight_sums + row * LANES;
    store(sum, load(sum) * all(kept) + Words::store_weights(scaled, weights));
    return kept;
  }

  static float power_of_two_of(float x) {
    float lanes[LANES];
    store(lanes, power_of_two(all(x)));
    return lanes[0];
  }

  void merge(int64_t row, float highest, const float* weight_sums, const float* sums) {
    float joint = total_.highest[row] > highest ? total_.highest[row] : highest;
    float reference = joint == LOWEST ? 0.0f : joint;
    Floats kept = power_of_two(all(total_.highest[row] - reference)), added = power_of_two(all(highest - reference));
    total_.highest[row] = joint;
    float* total = total_.weight_sums + row * LANES;
    store(total, load(total) * kept + load(weight_sums) * added);
    total = total_.sums + row * dims_;
    for (int64_t dim = 0; dim < dims_; dim += LANES)
      store(total + dim, load(total + dim) * kept + load(sums + dim) * added);
  }

  void finish() {
    for (int64_t row = 0; row < rows_; row++) {
      Floats scale = all(1.0f / lane_sum(load(total_.weight_sums + row * LANES)));
      float* sums = total_.sums + row * dims_;
      // Adding 0 turns -0, of which there may be more or fewer with the masked keys beside, into 0.
      for (int64_t dim = 0; dim < dims_; dim += LANES) store(sums + dim, load(sums + dim) * scale + all(0.0f));
      int64_t head = item_.kv_head * group_ + row % group_;
      int64_t at = ((item_.first_token + row / group_) * step_.num_heads + head) * step_.head_dim;
      put(layer_.output + at, sums, step_.head_dim);
    }
  }

  const Layer<Stored>& layer_;
  const AttentionStep& step_;
  const int64_t group_, words_, dims_;
  const float scale_ = 1.44269504f / std::sqrt(static_cast<float>(step_.head_dim));  // scores in powers of two
  Item item_;
  int64_t rows_, first_position_, last_position_;
  uint32_t *queries_, *staged_, *keys_, *values_, *weights_;
  float* scores_;
  State split_, total_;
};

}  // namespace

// What a decoder layer does besides products: norms, rotation, cache writes, the gate. Every row (or head, or number)
// is computed in one fixed order, so its bits do not depend on the rows beside it or on the threads.
//
// The compiler may vectorize loops over plain floats: with -ffp-contract=off each step rounds the same either way.

#include "vectors.h"

namespace {

// Numbers below which waking threads costs more than they save.
constexpr int64_t SERIAL_NUMBERS = 32768;

// Adds `update` (if any) to the residual row and writes its norm; sums of squares in LANES interleaved partial sums.
template <class Stored>
void norm_row(float* residual, const Stored* update, const float* weight, float epsilon, Stored* output, int64_t size) {
  float sums[LANES] = {}, part[LANES];
  for (int64_t i = 0; i < size; i += LANES) {
    int64_t n = size - i < LANES ? size - i : LANES;
    if (update) {
      fetch(part, update + i, n);
      for (int64_t j = 0; j < n; j++) residual[i + j] += part[j];
    }
    for (int64_t j = 0; j < n; j++) sums[j] += residual[i + j] * residual[i + j];
  }
  float scale = 1.0f / std::sqrt(lane_sum(load(sums)) / static_cast<float>(size) + epsilon);
  for (int64_t i = 0; i < size; i += LANES) {
    int64_t n = size - i < LANES ? size - i : LANES;
    for (int64_t j = 0; j < n; j++) part[j] = residual[i + j] * scale * weight[i + j];
    put(output + i, part, n);
  }
}

template <class Stored>
void norm_rows(float* residual, const Stored* update, const float* weight, float epsilon, Stored* output, int64_t rows,
               int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * size >= SERIAL_NUMBERS)
  for (int64_t row = 0; row < rows; row++)
    norm_row(residual + row * size, update ? update + row * size : nullptr, weight, epsilon, output + row * size, size);
}

// silu(x) = x * sigmoid(x); with t = exp(-|x|), sigmoid(x) is 1 / (1 + t), or t / (1 + t) for x < 0.
Floats silu(const float* x) {
  float magnitude[LANES], numerator[LANES], t[LANES];
  for (int i = 0; i < LANES; i++) magnitude[i] = -std::fabs(x[i]) * 1.44269504f;
  store(t, power_of_two(load(magnitude)));
  for (int i = 0; i < LANES; i++) numerator[i] = x[i] < 0.0f ? x[i] * t[i] : x[i];
  for (int i = 0; i < LANES; i++) t[i] = numerator[i] / (1.0f + t[i]);
  return load(t);
}

template <class Stored>
void gate_rows(const Stored* gate_up, Stored* output, int64_t rows, int64_t size, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && rows * size >= SERIAL_NUMBERS)
  for (int64_t row = 0; row < rows; row++) {
    const Stored *gate = gate_up + row * 2 * size, *up = gate + size;
    float gates[LANES] = {}, ups[LANES] = {};
    for (int64_t i = 0; i < size; i += LANES) {
      int64_t n = size - i < LANES ? size - i : LANES;
      fetch(gates, gate + i, n);
      fetch(ups, up + i, n);
      store(gates, silu(gates) * load(ups));
      put(output + row * size + i, gates, n);
    }
  }
}

}  // namespace

// Where a step's keys and values go, and how heads are turned. Mirrored by `_Rotation` in native_kernels.py.
struct Rotation {
  const float *cos, *signed_sin;  // [num_tokens, head_dim]
  const int64_t* slots;           // [num_tokens] block * block_size + offset
  int64_t num_tokens, num_heads, num_kv_heads, head_dim, block_size, threads;
};

namespace {

template <class Stored>
void rotate_head(const Stored* head, const float* cos, const float* signed_sin, Stored* output, int64_t size) {
  float x[LANES], y[LANES];
  int64_t half = size / 2;
  for (int side = 0; side < 2; side++)
    for (int64_t i = 0; i < half; i += LANES) {
      int64_t n = half - i < LANES ? half - i : LANES, at = side * half + i;
      fetch(x, head + at, n);
      fetch(y, head + (1 - side) * half + i, n);
      for (int64_t j = 0; j < n; j++) x[j] = x[j] * cos[at + j] + y[j] * signed_sin[at + j];
      put(output + at, x, n);
    }
}

template <class Stored>
void rotate_and_store(const Rotation& r, const Stored* query_keys, int64_t query_key_stride, const Stored* values,
                      int64_t value_stride, Stored* queries, Stored* key_cache, Stored* value_cache) {
  const int64_t size = r.head_dim, numbers = r.num_tokens * (r.num_heads + r.num_kv_heads) * size;
  const int threads = numbers < SERIAL_NUMBERS ? 1 : static_cast<int>(r.threads);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t token = 0; token < r.num_tokens; token++) {
    const Stored *heads = query_keys + token * query_key_stride, *value = values + token * value_stride;
    const float *cos = r.cos + token * size, *signed_sin = r.signed_sin + token * size;
    for (int64_t h = 0; h < r.num_heads; h++)
      rotate_head(heads + h * size, cos, signed_sin, queries + (token * r.num_heads + h) * size, size);
    int64_t block = r.slots[token] / r.block_size, offset = r.slots[token] % r.block_size;
    for (int64_t h = 0; h < r.num_kv_heads; h++) {
      int64_t at = ((block * r.num_kv_heads + h) * r.block_size + offset) * size;
      rotate_head(heads + (r.num_heads + h) * size, cos, signed_sin, key_cache + at, size);
      memcpy(value_cache + at, value + h * size, size * sizeof(Stored));
    }
  }
}

}  // namespace

extern "C" {

// residual [rows, size], changed where there is an update; update [rows, size] or null; output [rows, size].
void headrace_add_norm_float32(float* residual, const float* update, const float* weight, float epsilon, float* output,
                               int64_t rows, int64_t size, int64_t threads) {
  norm_rows(residual, update, weight, epsilon, output, rows, size, static_cast<int>(threads));
}
void headrace_add_norm_bfloat16(float* residual, const uint16_t* update, const float* weight, float epsilon,
                                uint16_t* output, int64_t rows, int64_t size, int64_t threads) {
  norm_rows(residual, update, weight, epsilon, output, rows, size, static_cast<int>(threads));
}

// gate_up [rows, 2 * size], gate first; output [rows, size].
void headrace_silu_mul_float32(const float* gate_up, float* output, int64_t rows, int64_t size, int64_t threads) {
  gate_rows(gate_up, output, rows, size, static_cast<int>(threads));
}
void headrace_silu_mul_bfloat16(const uint16_t* gate_up, uint16_t* output, int64_t rows, int64_t size,
                                int64_t threads) {
  gate_rows(gate_up, output, rows, size, static_cast<int>(threads));
}

// query_keys [num_tokens, num_heads + num_kv_heads, head_dim], values [num_tokens, num_kv_heads, head_dim], with strides
// in numbers from token to token; writes queries [num_tokens, num_heads, head_dim] and the caches.
void headrace_rotate_and_store_float32(const Rotation* rotation, const float* query_keys, int64_t query_key_stride,
                                       const float* values, int64_t value_stride, float* queries, float* key_cache,
                                       float* value_cache) {
  rotate_and_store(*rotation, query_keys, query_key_stride, values, value_stride, queries, key_cache, value_cache);
}
void headrace_rotate_and_store_bfloat16(const Rotation* rotation, const uint16_t* query_keys, int64_t query_key_stride,
                                        const uint16_t* values, int64_t value_stride, uint16_t* queries,
                                        uint16_t* key_cache, uint16_t* value_cache) {
  rotate_and_store(*rotation, query_keys, query_key_stride, values, value_stride, queries, key_cache, value_cache);
}
}

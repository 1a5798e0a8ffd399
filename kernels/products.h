// The two products that attention is made of: scores = queries x keys, sums = weights x values. A row's sums are the
// same bits whatever rows and columns are computed beside it.
#pragma once

#include "vectors.h"

namespace {

constexpr int KEY_TILE = 64;
constexpr int TILE_COLUMNS = KEY_TILE / LANES;

// How stored numbers become the 32-bit words of a product. FloatWords: one number a word.
struct FloatWords {
  static constexpr int PER_WORD = 1;
  static Floats multiply_add_words(uint32_t a, const uint32_t* b, Floats sum) {
    return multiply_add(all(float_of(a)), load(reinterpret_cast<const float*>(b)), sum);
  }
  // Writes the 64 weights as words and returns the sums of what was written, lane by lane.
  static Floats store_weights(const Floats* weights, uint32_t* words) {
    for (int i = 0; i < TILE_COLUMNS; i++) store(reinterpret_cast<float*>(words) + i * LANES, weights[i]);
    return (weights[0] + weights[1]) + (weights[2] + weights[3]);
  }
};

#if defined(__AVX512BF16__)
// Two bfloat16 numbers a word, multiplied in pairs and accumulated in float32.
struct PairWords {
  static constexpr int PER_WORD = 2;
  static Floats multiply_add_words(uint32_t a, const uint32_t* b, Floats sum) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)_mm512_loadu_si512(b))};
  }
  static Floats store_weights(const Floats* weights, uint32_t* words) {
    Floats sum[2];
    for (int i = 0; i < 2; i++) {
      __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh(weights[2 * i + 1].v, weights[2 * i].v);
      _mm512_storeu_si512(words + i * LANES, pairs);
      Floats even = {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))};
      Floats odd = {_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
      sum[i] = even + odd;
    }
    return sum[0] + sum[1];
  }
};
#endif

// sums[row][column] = start[row] * sums[row][column] + sum over steps of a[row][step] * b[step][column], one rounding
// after the other in the order of the steps. `start` null: sums begin at 0.
template <class Words, int ROWS, int COLUMNS>
void product_block(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t steps, float* sums,
                   int64_t sum_stride, const float* start) {
  Floats sum[ROWS][COLUMNS];
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < COLUMNS; c++)
      sum[r][c] = start ? load(sums + r * sum_stride + c * LANES) * all(start[r]) : all(0.0f);
  for (int64_t s = 0; s < steps; s++)
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < COLUMNS; c++)
        sum[r][c] = Words::multiply_add_words(a[r * a_stride + s], b + s * b_stride + c * LANES, sum[r][c]);
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < COLUMNS; c++) store(sums + r * sum_stride + c * LANES, sum[r][c]);
}

template <class Words, int ROWS, int COLUMNS>
void product_columns(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t steps,
                     float* sums, int64_t sum_stride, const float* start, int64_t columns) {
  for (; columns >= COLUMNS; columns -= COLUMNS, b += COLUMNS * LANES, sums += COLUMNS * LANES)
    product_block<Words, ROWS, COLUMNS>(a, a_stride, b, b_stride, steps, sums, sum_stride, start);
  if constexpr (COLUMNS > 1)
    if (columns)
      product_columns<Words, ROWS, COLUMNS - 1>(a, a_stride, b, b_stride, steps, sums, sum_stride, start, columns);
}

// At most MOST_ROWS rows; `columns` in vectors of LANES.
template <class Words, int ROWS = MOST_ROWS>
void product(int rows, const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t steps,
             float* sums, int64_t sum_stride, const float* start, int64_t columns) {
  if (rows == ROWS)
    product_columns<Words, ROWS, MOST_COLUMNS>(a, a_stride, b, b_stride, steps, sums, sum_stride, start, columns);
  else if constexpr (ROWS > 1)
    product<Words, ROWS - 1>(rows, a, a_stride, b, b_stride, steps, sums, sum_stride, start, columns);
}

}  // namespace

// Sixteen float lanes, on AVX-512, AVX2 or plain C++.
//
// Every operation rounds in a fixed way: multiply-add is one fused instruction or, in plain C++, two rounded steps
// (the file must be compiled with -ffp-contract=off), never what the compiler happens to choose.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#endif

constexpr int LANES = 16;

static inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float widened(uint16_t bfloat16) { return float_of(static_cast<uint32_t>(bfloat16) << 16); }

// Rounds to nearest, ties to even; NaN stays NaN.
static inline uint16_t rounded(float value) {
  uint32_t bits = bits_of(value);
  if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Numbers as they are stored, to and from float.
static inline void fetch(float* out, const float* stored, int64_t n) { memcpy(out, stored, n * sizeof(float)); }
static inline void fetch(float* out, const uint16_t* stored, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = widened(stored[i]);
}
static inline void put(float* out, const float* values, int64_t n) { memcpy(out, values, n * sizeof(float)); }
static inline void put(uint16_t* out, const float* values, int64_t n) {
  for (int64_t i = 0; i < n; i++) out[i] = rounded(values[i]);
}

#if defined(__AVX512F__)

// Accumulators of a product that fit into the registers: rows x vectors.
constexpr int MOST_ROWS = 6, MOST_COLUMNS = 4;
struct Floats { __m512 v; };
static inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
static inline Floats all(float a) { return {_mm512_set1_ps(a)}; }
static inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline Floats multiply_add(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// a > b ? a : b, so b where one is NaN.
static inline Floats maximum(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline Floats nearest(Floats a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^n for whole n in [-126, 127].
static inline Floats times_power(Floats a, Floats n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// x < limit ? 0 : a
static inline Floats zero_where_below(Floats x, float limit, Floats a) {
  return {_mm512_mask_mov_ps(a.v, _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_LT_OQ), _mm512_setzero_ps())};
}

// out[word][row] = rows[row][word] for 16 rows and 16 words.
static inline void transpose(const uint32_t* const* rows, int64_t word, uint32_t* out, int64_t out_stride) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + word);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // a[i + j]: word 4 * lane + j of rows i .. i + 3
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int j = 0; j < 4; j++) {
    __m512i low0 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), low1 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
    __m512i high0 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd), high1 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
    _mm512_storeu_si512(out + j * out_stride, _mm512_shuffle_i32x4(low0, low1, 0x88));
    _mm512_storeu_si512(out + (4 + j) * out_stride, _mm512_shuffle_i32x4(high0, high1, 0x88));
    _mm512_storeu_si512(out + (8 + j) * out_stride, _mm512_shuffle_i32x4(low0, low1, 0xdd));
    _mm512_storeu_si512(out + (12 + j) * out_stride, _mm512_shuffle_i32x4(high0, high1, 0xdd));
  }
}

#elif defined(__AVX2__) && defined(__FMA__)

constexpr int MOST_ROWS = 3, MOST_COLUMNS = 2;
struct Floats { __m256 a, b; };
static inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, Floats x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
static inline Floats all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline Floats operator+(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline Floats operator-(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline Floats operator*(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline Floats multiply_add(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline Floats maximum(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline Floats nearest(Floats x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
static inline __m256 power(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline Floats times_power(Floats x, Floats n) {
  return {_mm256_mul_ps(x.a, power(n.a)), _mm256_mul_ps(x.b, power(n.b))};
}
static inline Floats zero_where_below(Floats x, float limit, Floats y) {
  __m256 bound = _mm256_set1_ps(limit);
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.a, bound, _CMP_LT_OQ), y.a),
          _mm256_andnot_ps(_mm256_cmp_ps(x.b, bound, _CMP_LT_OQ), y.b)};
}

static inline void transpose(const uint32_t* const* rows, int64_t word, uint32_t* out, int64_t out_stride) {
  for (int corner = 0; corner < 4; corner++) {  // 8 rows and 8 words at a time
    int row = corner / 2 * 8, column = corner % 2 * 8;
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows[row + i] + word + column));
    for (int i = 0; i < 8; i += 2) {
      b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
      b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
      a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
      a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
      a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
      float* target = reinterpret_cast<float*>(out + (column + i) * out_stride + row);
      _mm256_storeu_ps(target, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
      _mm256_storeu_ps(target + 4 * out_stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
  }
}

#else

constexpr int MOST_ROWS = 2, MOST_COLUMNS = 1;
struct Floats { float v[LANES]; };
template <class F>
static inline Floats each(F f) {
  Floats result;
  for (int i = 0; i < LANES; i++) result.v[i] = f(i);
  return result;
}
static inline Floats load(const float* p) { return each([=](int i) { return p[i]; }); }
static inline void store(float* p, Floats a) { memcpy(p, a.v, sizeof a.v); }
static inline Floats all(float a) { return each([=](int) { return a; }); }
static inline Floats operator+(Floats a, Floats b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
static inline Floats operator-(Floats a, Floats b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
static inline Floats operator*(Floats a, Floats b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
static inline Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
static inline Floats maximum(Floats a, Floats b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
static inline Floats nearest(Floats a) { return each([&](int i) { return std::nearbyint(a.v[i]); }); }
static inline Floats times_power(Floats a, Floats n) {
  return each([&](int i) {
    int32_t exponent = n.v[i] == n.v[i] ? static_cast<int32_t>(n.v[i]) : 0;
    return a.v[i] * float_of(static_cast<uint32_t>(exponent + 127) << 23);
  });
}
static inline Floats zero_where_below(Floats x, float limit, Floats a) {
  return each([&](int i) { return x.v[i] < limit ? 0.0f : a.v[i]; });
}
static inline void transpose(const uint32_t* const* rows, int64_t word, uint32_t* out, int64_t out_stride) {
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 16; j++) out[j * out_stride + i] = rows[i][word + j];
}

#endif

// 2^x for x <= 0: relative error 2e-7, exactly 1 for 0, exactly 0 below -126; NaN stays NaN.
static inline Floats power_of_two(Floats x) {
  Floats whole = nearest(maximum(all(-126.0f), x));  // no lane may leave the exponent's range, not even an unused one
  Floats part = x - whole;
  Floats y = all(1.54035304e-4f);
  y = multiply_add(y, part, all(1.33335581e-3f));
  y = multiply_add(y, part, all(9.61812911e-3f));
  y = multiply_add(y, part, all(5.55041087e-2f));
  y = multiply_add(y, part, all(2.40226507e-1f));
  y = multiply_add(y, part, all(6.93147181e-1f));
  y = multiply_add(y, part, all(1.0f));
  return zero_where_below(x, -126.0f, times_power(y, whole));
}

// Sums and maxima over the lanes: by halves, so in one fixed order.
static inline float lane_sum(Floats a) {
  float v[LANES];
  store(v, a);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) v[i] += v[i + width];
  return v[0];
}

static inline float lane_maximum(Floats a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(a.v);
#else
  float v[LANES];
  store(v, a);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) v[i] = v[i] > v[i + width] ? v[i] : v[i + width];
  return v[0];
#endif
}

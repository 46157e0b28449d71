#include "gba_tf/cc/core/aggregate.h"

#include <xmmintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "gba_tf/cc/core/float16.h"
#include "tests/cc/testing.h"

namespace {

using gba::IdType;
using gba::kNumberOfSummedRows;
using gba::RowOrder;
using gba::SumDense;
using gba::SumRepeatedRows;
using gba::SumSources;
using gba::ValueType;
using gba::VariableLayout;

// ---- float16 and bfloat16, against arithmetic that shares nothing with the code ----

// The value of a 16-bit pattern by its definition. `exponent_bits` is 5 or 8.
double Value(uint16_t pattern, int exponent_bits) {
  const int mantissa_bits = 15 - exponent_bits;
  const int exponent = (pattern & 0x7fff) >> mantissa_bits;
  const double mantissa = pattern & ((1 << mantissa_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double sign = pattern & 0x8000 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

// Fills eight lanes with one value, and requires that they agree.
float Load(void (*load)(const void*, gba::FloatLanes*), uint16_t pattern) {
  uint16_t patterns[gba::kLanes];
  std::fill(patterns, patterns + gba::kLanes, pattern);
  gba::FloatLanes lanes;
  load(patterns, &lanes);
  const float first = lanes[0];
  for (int i = 1; i < gba::kLanes; ++i) {
    const float other = lanes[i];
    if (std::memcmp(&first, &other, 4) != 0) EXPECT_EQ(i, 0);
  }
  return first;
}

uint16_t Store(void (*store)(const gba::FloatLanes&, void*), float value) {
  uint16_t patterns[gba::kLanes];
  gba::FloatLanes lanes;
  for (int i = 0; i < gba::kLanes; ++i) lanes[i] = value;
  store(lanes, patterns);
  for (int i = 1; i < gba::kLanes; ++i) EXPECT_EQ(patterns[i], patterns[0]);
  return patterns[0];
}

struct Half {
  const char* name;
  int exponent_bits;
  void (*load)(const void*, gba::FloatLanes*);
  void (*store)(const gba::FloatLanes&, void*);
};

const Half kHalves[] = {
    {"float16", 5, [](const void* from, gba::FloatLanes* to) { gba::LoadFloat16(from, to); },
     [](const gba::FloatLanes& from, void* to) { gba::StoreFloat16(from, to); }},
    {"bfloat16", 8, [](const void* from, gba::FloatLanes* to) { gba::LoadBFloat16(from, to); },
     [](const gba::FloatLanes& from, void* to) { gba::StoreBFloat16(from, to); }},
};

// With those of this machine's instructions.
std::vector<Half> Halves() {
  std::vector<Half> halves(std::begin(kHalves), std::end(kHalves));
#if defined(GBA_AVX2)
  if (gba::HasAvx2()) {
    halves.push_back({"float16 by F16C", 5, gba::LoadFloat16F16c, gba::StoreFloat16F16c});
  }
#endif
  return halves;
}

TEST(Every16BitPatternIsLoadedExactlyAndStoredUnchanged) {
  for (const Half& half : Halves()) {
    for (int pattern = 0; pattern <= 0xffff; ++pattern) {
      const auto bits = static_cast<uint16_t>(pattern);
      const double expected = Value(bits, half.exponent_bits);
      const float loaded = Load(half.load, bits);
      if (std::isnan(expected)) {
        EXPECT_EQ(std::isnan(loaded), true);
        EXPECT_EQ(std::isnan(Value(Store(half.store, loaded), half.exponent_bits)), true);
        continue;
      }
      EXPECT_EQ(static_cast<double>(loaded), expected);
      EXPECT_EQ(std::signbit(loaded), pattern >= 0x8000);
      if (!EXPECT_EQ(Store(half.store, loaded), bits)) return;
    }
  }
}

// Checks floats just below, at and just above the middle between each pattern and the next.
TEST(StoringRoundsToNearestAndTiesToEven) {
  for (const Half& half : Halves()) {
    const int infinity = ((1 << half.exponent_bits) - 1) << (15 - half.exponent_bits);
    for (int pattern = 0; pattern < infinity; ++pattern) {
      const double low = Value(static_cast<uint16_t>(pattern), half.exponent_bits);
      // Beyond the largest number lies, for rounding, the next power of two.
      const double high =
          pattern + 1 < infinity
              ? Value(static_cast<uint16_t>(pattern + 1), half.exponent_bits)
              : low + (low - Value(static_cast<uint16_t>(pattern - 1), half.exponent_bits));
      const auto middle = static_cast<float>((low + high) / 2);
      EXPECT_EQ(static_cast<double>(middle), (low + high) / 2);
      const int even = pattern % 2 == 0 ? pattern : pattern + 1;
      const float next = std::nextafter(middle, std::numeric_limits<float>::infinity());
      const bool ok = EXPECT_EQ(Store(half.store, std::nextafter(middle, 0.0f)), pattern) &&
                      EXPECT_EQ(Store(half.store, middle), even) &&
                      EXPECT_EQ(Store(half.store, next), pattern + 1) &&
                      EXPECT_EQ(Store(half.store, -middle), 0x8000 | even) &&
                      EXPECT_EQ(Store(half.store, -next), 0x8000 | (pattern + 1));
      if (!ok) return;
    }
    const float infinite = std::numeric_limits<float>::infinity();
    EXPECT_EQ(Store(half.store, infinite), infinity);
    EXPECT_EQ(Store(half.store, std::numeric_limits<float>::max()), infinity);
  }
}

TEST(NotANumberStaysOneWhereverItsBitsAre) {
  for (uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0xff800001u, 0xffffffffu}) {
    float nan;
    std::memcpy(&nan, &bits, 4);
    for (const Half& half : Halves()) {
      EXPECT_EQ(std::isnan(Value(Store(half.store, nan), half.exponent_bits)), true);
    }
  }
}

TEST(SubnormalHalvesAreRightWhereSubnormalFloatsAreFlushed) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);  // Flush to zero, subnormals are zero.
  for (const Half& half : Halves()) {
    if (half.exponent_bits != 5) continue;
    for (int pattern = 1; pattern < 0x400; ++pattern) {
      const float loaded = Load(half.load, static_cast<uint16_t>(pattern));
      EXPECT_EQ(static_cast<double>(loaded), Value(static_cast<uint16_t>(pattern), 5));
      EXPECT_EQ(Store(half.store, loaded), pattern);
    }
  }
  _mm_setcsr(before);
}

#if defined(GBA_AVX2)
// For all bits that can matter: the last 11 of a float lie below the bit that rounds, so only
// whether they are 0 does.
TEST(F16cHasTheBitsOfThePortableCode) {
  if (!gba::HasAvx2()) return;
  const unsigned before = _mm_getcsr();
  for (unsigned flush : {0x0000u, 0x8040u}) {
    _mm_setcsr(before | flush);
    for (uint32_t first = 0; first <= 0xffff; first += gba::kLanes) {
      uint16_t patterns[gba::kLanes];
      for (uint32_t i = 0; i < gba::kLanes; ++i) patterns[i] = static_cast<uint16_t>(first + i);
      gba::FloatLanes portable, f16c;
      gba::LoadFloat16(patterns, &portable);
      gba::LoadFloat16F16c(patterns, &f16c);
      for (int i = 0; i < gba::kLanes; ++i) {
        const uint32_t quiet = std::isnan(portable[i]) ? 0x00400000 : 0;
        const uint32_t expected = reinterpret_cast<gba::UInt32Lanes>(portable)[i] | quiet;
        const uint32_t found = reinterpret_cast<gba::UInt32Lanes>(f16c)[i];
        if (found != expected) EXPECT_EQ(found, expected);
      }
    }
    for (uint32_t low : {0x000u, 0x001u, 0x400u, 0x7ffu}) {
      for (uint32_t high = 0; high < 1u << 21; high += gba::kLanes) {
        const gba::UInt32Lanes bits =
            ((gba::UInt32Lanes{0, 1, 2, 3, 4, 5, 6, 7} + high) << 11) | low;
        uint16_t portable[gba::kLanes], f16c[gba::kLanes];
        gba::StoreFloat16(reinterpret_cast<gba::FloatLanes>(bits), portable);
        gba::StoreFloat16F16c(reinterpret_cast<gba::FloatLanes>(bits), f16c);
        if (std::memcmp(portable, f16c, sizeof(portable)) == 0) continue;
        for (int i = 0; i < gba::kLanes; ++i) EXPECT_EQ(f16c[i], portable[i]);
        _mm_setcsr(before);
        return;
      }
    }
  }
  _mm_setcsr(before);
}
#endif

// ---- Sums, against plain loops ----

uint64_t Random(uint64_t* state) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return *state >> 33;
}

float RandomFloat(uint64_t* state) {
  return (static_cast<float>(Random(state) % 2000) - 1000) *
         std::ldexp(1.0f, static_cast<int>(Random(state) % 20) - 10);
}

// Sums in order, in the type's own arithmetic: the same bits are expected.
template <typename T>
std::vector<T> PlainMean(const std::vector<std::vector<T>>& sources, size_t n, int64_t divisor) {
  std::vector<T> mean(n);
  for (size_t i = 0; i < n; ++i) {
    volatile T sum = sources[0][i];
    for (size_t m = 1; m < sources.size(); ++m) sum = sum + sources[m][i];
    mean[i] = sum / static_cast<T>(divisor);
  }
  return mean;
}

const size_t kSizes[] = {0, 1, 7, 8, 9, 100, 4095, 4096, 4097, 10001};
const size_t kCounts[] = {1, 2, 3, 4, 5, 6, 8, 9, 32};

template <typename T>
void CheckDense(ValueType type) {
  uint64_t state = 7;
  for (size_t n : kSizes) {
    for (size_t num_sources : kCounts) {
      std::vector<std::vector<T>> sources(num_sources, std::vector<T>(n));
      for (auto& source : sources) {
        for (T& value : source) value = static_cast<T>(RandomFloat(&state));
      }
      for (size_t shift : {0, 3}) {  // Of every address, in bytes.
        std::vector<std::string> shifted;
        std::vector<const void*> pointers;
        for (const auto& source : sources) {
          shifted.push_back(std::string(shift, 'x'));
          shifted.back().append(reinterpret_cast<const char*>(source.data()), n * sizeof(T));
          shifted.back().shrink_to_fit();
        }
        for (const auto& bytes : shifted) pointers.push_back(bytes.data() + shift);
        std::string out(shift + n * sizeof(T) + 1, 'y');
        SumDense(type, pointers, static_cast<int64_t>(n), 7, &out[shift]);
        std::vector<T> found(n);
        if (n > 0) std::memcpy(found.data(), &out[shift], n * sizeof(T));
        EXPECT_EQ(found == PlainMean(sources, n, 7), true);
        EXPECT_EQ(out.back(), 'y');
      }
    }
  }
}

TEST(DenseFloat32HasTheBitsOfAPlainLoop) { CheckDense<float>(ValueType::kFloat32); }
TEST(DenseFloat64HasTheBitsOfAPlainLoop) { CheckDense<double>(ValueType::kFloat64); }

TEST(DenseHalvesAreSummedInFloat32AndRoundedOnce) {
  const ValueType types[] = {ValueType::kFloat16, ValueType::kBFloat16};
  uint64_t state = 3;
  for (size_t h = 0; h < 2; ++h) {
    const Half& half = kHalves[h];
    for (size_t n : kSizes) {
      for (size_t num_sources : kCounts) {
        std::vector<std::vector<uint16_t>> sources(num_sources, std::vector<uint16_t>(n));
        std::vector<std::vector<float>> wide(num_sources, std::vector<float>(n));
        std::vector<const void*> pointers;
        for (size_t m = 0; m < num_sources; ++m) {
          for (size_t i = 0; i < n; ++i) {
            sources[m][i] = Store(half.store, RandomFloat(&state));
            wide[m][i] = static_cast<float>(Value(sources[m][i], half.exponent_bits));
          }
          pointers.push_back(sources[m].data());
        }
        std::vector<uint16_t> found(n), expected;
        SumDense(types[h], pointers, static_cast<int64_t>(n), 3, found.data());
        for (float mean : PlainMean(wide, n, 3)) expected.push_back(Store(half.store, mean));
        EXPECT_EQ(found == expected, true);
      }
    }
  }
}

TEST(TheResultIsATrueDivision) {
  // 5 / 49 and 5 * (1 / 49) differ in float32, as they do for about one number in eight.
  const float five = 5;
  const volatile float reciprocal = 1.0f / 49;
  EXPECT_EQ(5.0f * reciprocal == 5.0f / 49, false);
  float found = 0;
  SumDense(ValueType::kFloat32, {&five}, 1, 49, &found);
  EXPECT_EQ(found, 5.0f / 49);
}

TEST(TermsAreAddedInTheOrderGiven) {
  // ((1e8 + 1) - 1e8) + 1 is 1 in float32; other orders give 0 or 2.
  const float a = 1e8f, b = 1, c = -1e8f, d = 1;
  float found = 0;
  SumDense(ValueType::kFloat32, {&a, &b, &c, &d}, 1, 1, &found);
  EXPECT_EQ(found, 1.0f);
  SumDense(ValueType::kFloat32, {&a, &c, &b, &d}, 1, 1, &found);
  EXPECT_EQ(found, 2.0f);
}

TEST(NoSourcesGiveZeros) {
  std::vector<double> found = {1, 2, 3};
  SumDense(ValueType::kFloat64, {}, 3, 4, found.data());
  EXPECT_EQ(found, (std::vector<double>{0, 0, 0}));
}

VariableLayout SparseLayout(ValueType type, IdType id_type, int64_t num_rows, int64_t row_width) {
  VariableLayout layout;
  layout.value_type = type;
  layout.sparse = true;
  layout.id_type = id_type;
  layout.num_rows = num_rows;
  layout.row_width = row_width;
  return layout;
}

TEST(RowsAreOrderedByIdThenIndex) {
  RowOrder order;
  EXPECT_OK(order.Init(10, 3, 3));
  order.Add(7, 0);
  order.Add(2, 1);
  order.Add(7, 2);
  order.Sort();
  std::vector<int64_t> rows, indices;
  for (uint64_t key : order) {
    rows.push_back(order.Row(key));
    indices.push_back(order.Index(key));
  }
  EXPECT_EQ(rows, (std::vector<int64_t>{2, 7, 7}));
  EXPECT_EQ(indices, (std::vector<int64_t>{1, 0, 2}));
  EXPECT_EQ(order.num_distinct(), 2);
  EXPECT_ERROR(order.Init(int64_t{1} << 62, 8, 1), gba::StatusCode::kInvalidArgument,
               "(62 bits) and 8 indices (3 bits). Partition the variable.");
}

// `Id` and enough occurrences for both ways to sort.
template <typename Id>
void CheckSparse(IdType id_type, int64_t num_rows, size_t rows_each, int64_t width,
                 bool by_occurrence) {
  constexpr size_t kSources = 5;
  uint64_t state = static_cast<uint64_t>(num_rows + width);
  std::map<int64_t, std::vector<float>> sums;
  std::map<int64_t, int64_t> occurrences;
  std::vector<std::vector<float>> values(kSources);
  std::vector<const void*> pointers;
  RowOrder order;
  EXPECT_OK(order.Init(num_rows, kSources, kSources * static_cast<int64_t>(rows_each)));
  for (size_t s = 0; s < kSources; ++s) {
    std::vector<int64_t> ids;
    for (size_t r = 0; r < rows_each; ++r) {
      ids.push_back(static_cast<int64_t>(Random(&state) << 20 | Random(&state)) % num_rows);
    }
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    for (int64_t id : ids) {
      order.Add(id, static_cast<int64_t>(s));
      ++occurrences[id];
      std::vector<float>& sum = sums[id];
      const bool first = sum.empty();
      for (int64_t j = 0; j < width; ++j) {
        const float value = RandomFloat(&state);
        values[s].push_back(value);
        if (first) {
          sum.push_back(value);
        } else {
          sum[static_cast<size_t>(j)] += value;
        }
      }
    }
    pointers.push_back(values[s].data());
  }
  order.Sort();
  EXPECT_EQ(order.num_distinct(), static_cast<int64_t>(sums.size()));
  std::vector<Id> expected_ids;
  std::vector<float> expected;
  for (const auto& [id, sum] : sums) {
    expected_ids.push_back(static_cast<Id>(id));
    const int64_t divisor = by_occurrence ? occurrences[id] : 7;
    for (float value : sum) expected.push_back(value / static_cast<float>(divisor));
  }
  std::vector<Id> ids(sums.size());
  std::vector<float> found(expected.size());
  SumSources(SparseLayout(ValueType::kFloat32, id_type, num_rows, width), order, pointers,
             by_occurrence ? kNumberOfSummedRows : 7, ids.data(), found.data());
  EXPECT_EQ(ids == expected_ids, true);
  EXPECT_EQ(found == expected, true);
}

TEST(SparseSumsHaveTheBitsOfAPlainLoop) {
  for (bool by_occurrence : {false, true}) {
    for (int64_t width : {1, 7, 8, 15, 16, 17, 40}) {
      CheckSparse<int32_t>(IdType::kInt32, 50, 20, width, by_occurrence);
      CheckSparse<int64_t>(IdType::kInt64, 3000, 1000, width, by_occurrence);
      CheckSparse<int64_t>(IdType::kInt64, int64_t{1} << 50, 300, width, by_occurrence);
    }
    CheckSparse<int64_t>(IdType::kInt64, 1, 1, 3, by_occurrence);
  }
}

TEST(SparseFloat64AndHalves) {
  RowOrder order;
  EXPECT_OK(order.Init(9, 2, 3));
  order.Add(4, 0);
  order.Add(4, 1);
  order.Add(8, 1);
  order.Sort();
  int32_t ids[2];
  const double a[] = {1e16}, b[] = {2, 6};
  double wide[2];
  SumSources(SparseLayout(ValueType::kFloat64, IdType::kInt32, 9, 1), order, {a, b}, 2, ids, wide);
  EXPECT_EQ(wide[0], 5e15 + 1);
  EXPECT_EQ(wide[1], 3.0);
  EXPECT_EQ(ids[0], 4);
  EXPECT_EQ(ids[1], 8);
  const uint16_t float16_a[] = {0x6800}, float16_b[] = {0x4200, 0x4200};  // 2048; 3, 3.
  uint16_t halves[2];
  SumSources(SparseLayout(ValueType::kFloat16, IdType::kInt32, 9, 1), order, {float16_a, float16_b},
             2, ids, halves);
  EXPECT_EQ(halves[0], 0x6402);  // 1025.5 lies between 1025 and 1026: to even.
  EXPECT_EQ(halves[1], 0x3e00);  // 1.5
  const uint16_t bfloat16_a[] = {0x4380}, bfloat16_b[] = {0x4040, 0x4040};  // 256; 3, 3.
  SumSources(SparseLayout(ValueType::kBFloat16, IdType::kInt32, 9, 1), order,
             {bfloat16_a, bfloat16_b}, 2, ids, halves);
  EXPECT_EQ(halves[0], 0x4302);  // 129.5 lies between 129 and 130: to even.
  EXPECT_EQ(halves[1], 0x3fc0);  // 1.5
}

TEST(RepeatedRowsOfOneArrayAreSummed) {
  RowOrder order;
  EXPECT_OK(order.Init(9, 3, 3));
  order.Add(5, 0);
  order.Add(1, 1);
  order.Add(5, 2);
  order.Sort();
  const float values[] = {1, 2, 10, 20, 100, 200};
  int64_t ids[2];
  std::vector<float> sums(4);
  SumRepeatedRows(SparseLayout(ValueType::kFloat32, IdType::kInt64, 9, 2), order, values, ids,
                  sums.data());
  EXPECT_EQ(ids[0], 1);
  EXPECT_EQ(ids[1], 5);
  EXPECT_EQ(sums, (std::vector<float>{10, 20, 101, 202}));
}

}  // namespace

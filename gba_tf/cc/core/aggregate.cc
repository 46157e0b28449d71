#include "gba_tf/cc/core/aggregate.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "gba_tf/cc/core/float16.h"

namespace gba {
namespace {

// How a value type is stored and summed.
struct Float32 {
  using Stored = float;
  using Sum = float;
  using Lanes = FloatLanes;
  static GBA_INLINE void Load(const char* from, Lanes* lanes) {
    std::memcpy(lanes, from, sizeof(*lanes));
  }
  static GBA_INLINE void Store(const Lanes& lanes, char* to) {
    std::memcpy(to, &lanes, sizeof(lanes));
  }
};
struct Float64 {
  using Stored = double;
  using Sum = double;
  using Lanes = DoubleLanes;
  static GBA_INLINE void Load(const char* from, Lanes* lanes) {
    std::memcpy(lanes, from, sizeof(*lanes));
  }
  static GBA_INLINE void Store(const Lanes& lanes, char* to) {
    std::memcpy(to, &lanes, sizeof(lanes));
  }
};
struct Float16 {
  using Stored = uint16_t;
  using Sum = float;
  using Lanes = FloatLanes;
  static GBA_INLINE void Load(const char* from, Lanes* lanes) { LoadFloat16(from, lanes); }
  static GBA_INLINE void Store(const Lanes& lanes, char* to) { StoreFloat16(lanes, to); }
};
#if defined(GBA_AVX2)
struct Float16F16c : Float16 {
  GBA_AVX2 static inline void Load(const char* from, Lanes* lanes) { LoadFloat16F16c(from, lanes); }
  GBA_AVX2 static inline void Store(const Lanes& lanes, char* to) { StoreFloat16F16c(lanes, to); }
};
#endif
struct BFloat16 {
  using Stored = uint16_t;
  using Sum = float;
  using Lanes = FloatLanes;
  static GBA_INLINE void Load(const char* from, Lanes* lanes) { LoadBFloat16(from, lanes); }
  static GBA_INLINE void Store(const Lanes& lanes, char* to) { StoreBFloat16(lanes, to); }
};

template <typename Type>
constexpr int64_t kStoredBytes = static_cast<int64_t>(sizeof(typename Type::Stored));

// Reads and writes the first `count` < kLanes values; the other lanes are 0.
template <typename Type>
GBA_INLINE void LoadSome(const char* from, int64_t count, typename Type::Lanes* lanes) {
  char padded[kLanes * kStoredBytes<Type>] = {};
  std::memcpy(padded, from, static_cast<size_t>(count * kStoredBytes<Type>));
  Type::Load(padded, lanes);
}
template <typename Type>
GBA_INLINE void StoreSome(const typename Type::Lanes& lanes, int64_t count, char* to) {
  char padded[kLanes * kStoredBytes<Type>];
  Type::Store(lanes, padded);
  std::memcpy(to, padded, static_cast<size_t>(count * kStoredBytes<Type>));
}

// ---- Dense ----

constexpr int64_t kTile = 4096;  // Elements whose partial sums stay in the L1 or L2 cache.
static_assert(kTile % kLanes == 0, "A tile is whole lanes");

// tile (+)= terms[0] + ..., in this order, from element `begin` on. Several terms at once save
// loads and stores of the tile and give the memory system independent streams.
template <typename Type, int kTerms, bool kFirst>
GBA_INLINE void AddTerms(const void* const* sources, int64_t begin, int64_t count,
                         typename Type::Lanes* tile) {
  using Lanes = typename Type::Lanes;
  const char* terms[kTerms];
  for (int t = 0; t < kTerms; ++t) {
    terms[t] = static_cast<const char*>(sources[t]) + begin * kStoredBytes<Type>;
  }
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Lanes sum, term;
    Type::Load(terms[0] + i * kStoredBytes<Type>, &sum);
    if (!kFirst) sum = tile[i / kLanes] + sum;
    for (int t = 1; t < kTerms; ++t) {
      Type::Load(terms[t] + i * kStoredBytes<Type>, &term);
      sum += term;
    }
    tile[i / kLanes] = sum;
  }
  if (i == count) return;
  for (int t = 0; t < kTerms; ++t) {
    Lanes term;
    LoadSome<Type>(terms[t] + i * kStoredBytes<Type>, count - i, &term);
    if (kFirst && t == 0) {
      tile[i / kLanes] = term;
    } else {
      tile[i / kLanes] += term;
    }
  }
}

template <typename Type>
GBA_INLINE void SumDenseBody(const std::vector<const void*>& sources, int64_t num_elements,
                             int64_t divisor, void* values) {
  using Lanes = typename Type::Lanes;
  Lanes tile[kTile / kLanes];
  const Lanes denominator = Lanes{} + static_cast<typename Type::Sum>(divisor);
  for (int64_t begin = 0; begin < num_elements; begin += kTile) {
    const int64_t count = std::min(kTile, num_elements - begin);
    size_t s = 0;
    if (sources.size() >= 4) {
      AddTerms<Type, 4, true>(&sources[0], begin, count, tile);
      s = 4;
    } else {
      AddTerms<Type, 1, true>(&sources[0], begin, count, tile);
      s = 1;
    }
    for (; s + 4 <= sources.size(); s += 4) {
      AddTerms<Type, 4, false>(&sources[s], begin, count, tile);
    }
    for (; s < sources.size(); ++s) AddTerms<Type, 1, false>(&sources[s], begin, count, tile);

    char* out = static_cast<char*>(values) + begin * kStoredBytes<Type>;
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      Type::Store(tile[i / kLanes] / denominator, out + i * kStoredBytes<Type>);
    }
    if (i < count) {
      StoreSome<Type>(tile[i / kLanes] / denominator, count - i, out + i * kStoredBytes<Type>);
    }
  }
}

// ---- Sparse ----

// Sums kVectors * kLanes elements of rows, from byte `begin` of a row on, in registers.
template <typename Type, int kVectors>
GBA_INLINE void SumRowChunk(const std::vector<const char*>& rows, int64_t begin,
                            const typename Type::Lanes& denominator, char* out) {
  constexpr int64_t kVectorBytes = kLanes * kStoredBytes<Type>;
  typename Type::Lanes sum[kVectors], term;
  for (int v = 0; v < kVectors; ++v) Type::Load(rows[0] + begin + v * kVectorBytes, &sum[v]);
  for (size_t r = 1; r < rows.size(); ++r) {
    for (int v = 0; v < kVectors; ++v) {
      Type::Load(rows[r] + begin + v * kVectorBytes, &term);
      sum[v] += term;
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    Type::Store(sum[v] / denominator, out + begin + v * kVectorBytes);
  }
}

template <typename Type>
GBA_INLINE void SumRow(const std::vector<const char*>& rows, int64_t width, int64_t divisor,
                       char* out) {
  using Lanes = typename Type::Lanes;
  const Lanes denominator = Lanes{} + static_cast<typename Type::Sum>(divisor);
  int64_t i = 0;
  for (; i + 2 * kLanes <= width; i += 2 * kLanes) {
    SumRowChunk<Type, 2>(rows, i * kStoredBytes<Type>, denominator, out);
  }
  for (; i + kLanes <= width; i += kLanes) {
    SumRowChunk<Type, 1>(rows, i * kStoredBytes<Type>, denominator, out);
  }
  if (i == width) return;
  Lanes sum, term;
  LoadSome<Type>(rows[0] + i * kStoredBytes<Type>, width - i, &sum);
  for (size_t r = 1; r < rows.size(); ++r) {
    LoadSome<Type>(rows[r] + i * kStoredBytes<Type>, width - i, &term);
    sum += term;
  }
  StoreSome<Type>(sum / denominator, width - i, out + i * kStoredBytes<Type>);
}

// Finds a row by its position in one array.
struct RowsByPosition {
  GBA_INLINE const char* Next(int64_t index) { return values + index * row_bytes; }
  const char* values;
  int64_t row_bytes;
};

// Finds a row as the next one of its source.
struct RowsBySource {
  GBA_INLINE const char* Next(int64_t index) {
    const char* row = next[static_cast<size_t>(index)];
    next[static_cast<size_t>(index)] = row + row_bytes;
    // With many sources their rows come too seldom for the hardware to see that they are streams.
    __builtin_prefetch(row + kPrefetchBytes);
    return row;
  }
  static constexpr int64_t kPrefetchBytes = 256;
  std::vector<const char*> next;
  int64_t row_bytes;
};

template <typename Type, typename Rows>
GBA_INLINE void SumSparseBody(const VariableLayout& layout, const RowOrder& order, int64_t divisor,
                              Rows* source, void* ids, void* sums) {
  std::vector<const char*> rows;
  const int64_t row_bytes = layout.row_width * kStoredBytes<Type>;
  const int64_t id_bytes = static_cast<int64_t>(SizeOf(layout.id_type));
  int64_t out = 0;
  for (const uint64_t* key = order.begin(); key != order.end(); ++out) {
    const int64_t row = order.Row(*key);
    rows.clear();
    for (; key != order.end() && order.Row(*key) == row; ++key) {
      rows.push_back(source->Next(order.Index(*key)));
    }
    // The low bytes of a little-endian id are the id.
    std::memcpy(static_cast<char*>(ids) + out * id_bytes, &row, static_cast<size_t>(id_bytes));
    SumRow<Type>(rows, layout.row_width,
                 divisor == kNumberOfSummedRows ? static_cast<int64_t>(rows.size()) : divisor,
                 static_cast<char*>(sums) + out * row_bytes);
  }
}

// ---- One function per value type and instruction set ----

template <typename Type>
void SumDensePortable(const std::vector<const void*>& sources, int64_t num_elements,
                      int64_t divisor, void* values) {
  SumDenseBody<Type>(sources, num_elements, divisor, values);
}

template <typename Type, typename Rows>
void SumSparsePortable(const VariableLayout& layout, const RowOrder& order, int64_t divisor,
                       Rows* source, void* ids, void* sums) {
  SumSparseBody<Type>(layout, order, divisor, source, ids, sums);
}

#if defined(GBA_AVX2)
// Two functions and a choice, not target_clones: its resolver runs before ThreadSanitizer is ready.
template <typename Type>
using OnAvx2 = std::conditional_t<std::is_same_v<Type, Float16>, Float16F16c, Type>;

template <typename Type>
GBA_AVX2 void SumDenseAvx2(const std::vector<const void*>& sources, int64_t num_elements,
                           int64_t divisor, void* values) {
  SumDenseBody<OnAvx2<Type>>(sources, num_elements, divisor, values);
}

template <typename Type, typename Rows>
GBA_AVX2 void SumSparseAvx2(const VariableLayout& layout, const RowOrder& order, int64_t divisor,
                            Rows* source, void* ids, void* sums) {
  SumSparseBody<OnAvx2<Type>>(layout, order, divisor, source, ids, sums);
}
#endif

template <typename Type>
void SumDenseOf(const std::vector<const void*>& sources, int64_t num_elements, int64_t divisor,
                void* values) {
  if (sources.empty()) {
    if (num_elements > 0) {
      std::memset(values, 0, static_cast<size_t>(num_elements) * sizeof(typename Type::Stored));
    }
    return;
  }
#if defined(GBA_AVX2)
  if (HasAvx2()) return SumDenseAvx2<Type>(sources, num_elements, divisor, values);
#endif
  SumDensePortable<Type>(sources, num_elements, divisor, values);
}

template <typename Type, typename Rows>
void SumSparseOf(const VariableLayout& layout, const RowOrder& order, int64_t divisor, Rows* source,
                 void* ids, void* sums) {
#if defined(GBA_AVX2)
  if (HasAvx2()) return SumSparseAvx2<Type>(layout, order, divisor, source, ids, sums);
#endif
  SumSparsePortable<Type>(layout, order, divisor, source, ids, sums);
}

template <typename Rows>
void SumSparse(const VariableLayout& layout, const RowOrder& order, int64_t divisor, Rows* source,
               void* ids, void* sums) {
  switch (layout.value_type) {
    case ValueType::kFloat32:
      return SumSparseOf<Float32>(layout, order, divisor, source, ids, sums);
    case ValueType::kFloat64:
      return SumSparseOf<Float64>(layout, order, divisor, source, ids, sums);
    case ValueType::kFloat16:
      return SumSparseOf<Float16>(layout, order, divisor, source, ids, sums);
    case ValueType::kBFloat16:
      return SumSparseOf<BFloat16>(layout, order, divisor, source, ids, sums);
  }
}

int64_t RowBytes(const VariableLayout& layout) {
  return layout.row_width * static_cast<int64_t>(SizeOf(layout.value_type));
}

}  // namespace

void SumDense(ValueType type, const std::vector<const void*>& sources, int64_t num_elements,
              int64_t divisor, void* values) {
  switch (type) {
    case ValueType::kFloat32:
      return SumDenseOf<Float32>(sources, num_elements, divisor, values);
    case ValueType::kFloat64:
      return SumDenseOf<Float64>(sources, num_elements, divisor, values);
    case ValueType::kFloat16:
      return SumDenseOf<Float16>(sources, num_elements, divisor, values);
    case ValueType::kBFloat16:
      return SumDenseOf<BFloat16>(sources, num_elements, divisor, values);
  }
}

void SumRepeatedRows(const VariableLayout& layout, const RowOrder& order, const void* values,
                     void* ids, void* sums) {
  RowsByPosition rows{static_cast<const char*>(values), RowBytes(layout)};
  SumSparse(layout, order, 1, &rows, ids, sums);
}

void SumSources(const VariableLayout& layout, const RowOrder& order,
                const std::vector<const void*>& sources, int64_t divisor, void* ids, void* sums) {
  RowsBySource rows{{}, RowBytes(layout)};
  for (const void* source : sources) rows.next.push_back(static_cast<const char*>(source));
  SumSparse(layout, order, divisor, &rows, ids, sums);
}

}  // namespace gba

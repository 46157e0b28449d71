// The sums: sum(gradients) / divisor, for dense variables and for sparse rows.
//
// Terms are added one after the other in the order given, starting from the first, so the bits of
// the result depend on nothing but the terms and their order. float16 and bfloat16 are added and
// divided in float32 and rounded once, at the end. The result is x / divisor, never
// x * (1 / divisor). Pointers need no alignment.
//
// The loops are compiled twice, for any x86-64 and for AVX2 with F16C, and the machine's best is
// taken at run time. AVX2 without FMA gives the same bits.
#ifndef GBA_TF_CC_CORE_AGGREGATE_H_
#define GBA_TF_CC_CORE_AGGREGATE_H_

#include <cstdint>
#include <vector>

#include "gba_tf/cc/core/packed_gradient.h"
#include "gba_tf/cc/core/row_order.h"

namespace gba {

// As a divisor: the number of rows that were summed.
constexpr int64_t kNumberOfSummedRows = 0;

// values[i] = (sources[0][i] + sources[1][i] + ...) / divisor; zeros if there are no sources.
// `divisor` is at least 1.
void SumDense(ValueType type, const std::vector<const void*>& sources, int64_t num_elements,
              int64_t divisor, void* values);

// Sums rows of one array: the index in `order` is a row's position in `values`. Writes
// order.num_distinct() ids, ascending, and as many sums.
void SumRepeatedRows(const VariableLayout& layout, const RowOrder& order, const void* values,
                     void* ids, void* sums);

// Sums rows of several gradients: the index in `order` is the number of a source, and source s has
// its rows one after the other, in ascending order of ids. Writes as above, divided by `divisor`.
void SumSources(const VariableLayout& layout, const RowOrder& order,
                const std::vector<const void*>& sources, int64_t divisor, void* ids, void* sums);

}  // namespace gba

#endif  // GBA_TF_CC_CORE_AGGREGATE_H_

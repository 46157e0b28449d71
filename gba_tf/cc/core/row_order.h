// The occurrences of sparse rows in the order in which they are summed: by row id, and for one row
// in ascending order of an index (a position, or the number of a gradient).
#ifndef GBA_TF_CC_CORE_ROW_ORDER_H_
#define GBA_TF_CC_CORE_ROW_ORDER_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include "gba_tf/cc/core/status.h"

namespace gba {

// Example: Init(10, 3, 3), Add(7, 0), Add(2, 1), Add(7, 2), Sort() -> keys (2, 1), (7, 0), (7, 2);
// two distinct rows.
class RowOrder {
 public:
  // Rows are in [0, num_rows), indices in [0, num_indices); at most `max_size` occurrences are
  // added. Returns InvalidArgument if a row and an index together need more than 64 bits.
  Status Init(int64_t num_rows, int64_t num_indices, int64_t max_size);

  // Indices are added in ascending order (equal ones with different rows).
  void Add(int64_t row, int64_t index) {
    keys_[size_++] = static_cast<uint64_t>(row) << index_bits_ | static_cast<uint64_t>(index);
  }
  // Call once, after the last Add. Linear in the number of occurrences.
  void Sort();

  int64_t num_distinct() const { return num_distinct_; }

  // The occurrences, from begin() to end(), and what they are made of.
  const uint64_t* begin() const { return keys_.get(); }
  const uint64_t* end() const { return keys_.get() + size_; }
  int64_t Row(uint64_t key) const { return static_cast<int64_t>(key >> index_bits_); }
  int64_t Index(uint64_t key) const {
    return static_cast<int64_t>(key & ((uint64_t{1} << index_bits_) - 1));
  }

 private:
  void RadixSort();

  // row << index_bits_ | index. An array, not a vector: it need not be cleared first.
  std::unique_ptr<uint64_t[]> keys_;
  size_t size_ = 0;
  int row_bits_ = 0;
  int index_bits_ = 0;
  int64_t num_distinct_ = 0;
};

}  // namespace gba

#endif  // GBA_TF_CC_CORE_ROW_ORDER_H_

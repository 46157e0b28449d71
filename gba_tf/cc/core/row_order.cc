#include "gba_tf/cc/core/row_order.h"

#include <algorithm>
#include <array>
#include <string>

namespace gba {
namespace {

constexpr int kMaxDigitBits = 11;  // The write heads of 2^11 buckets still fit the L2 cache.
constexpr size_t kSmall = 512;     // Below this, clearing histograms costs more than comparing.

// Bits needed for values in [0, count).
int BitsFor(int64_t count) {
  int bits = 0;
  while (bits < 63 && (int64_t{1} << bits) < count) ++bits;
  return bits;
}

}  // namespace

Status RowOrder::Init(int64_t num_rows, int64_t num_indices, int64_t max_size) {
  index_bits_ = BitsFor(num_indices);
  row_bits_ = BitsFor(num_rows);
  if (row_bits_ + index_bits_ > 64) {
    return Status::InvalidArgument(
        "Expected a row id and an index to fit 64 bits, found " + std::to_string(num_rows) +
        " rows (" + std::to_string(row_bits_) + " bits) and " + std::to_string(num_indices) +
        " indices (" + std::to_string(index_bits_) + " bits). Partition the variable.");
  }
  keys_.reset(new uint64_t[static_cast<size_t>(max_size)]);
  size_ = 0;
  num_distinct_ = 0;
  return Status();
}

void RowOrder::Sort() {
  uint64_t* const end = keys_.get() + size_;
  // Indices were added in ascending order, so sorting whole keys and a stable sort by row agree.
  if (!std::is_sorted(keys_.get(), end)) {
    if (size_ < kSmall) {
      std::sort(keys_.get(), end);
    } else {
      RadixSort();
    }
  }
  num_distinct_ = size_ == 0 ? 0 : 1;
  for (size_t i = 1; i < size_; ++i) {
    num_distinct_ += (keys_[i] >> index_bits_) != (keys_[i - 1] >> index_bits_);
  }
}

// Sorts by row, least significant digit first. Stable.
void RowOrder::RadixSort() {
  const int num_passes = (row_bits_ + kMaxDigitBits - 1) / kMaxDigitBits;
  const int digit_bits = (row_bits_ + num_passes - 1) / num_passes;
  const uint64_t mask = (uint64_t{1} << digit_bits) - 1;
  std::unique_ptr<uint64_t[]> sorted(new uint64_t[size_]);
  std::array<size_t, size_t{1} << kMaxDigitBits> position;
  for (int pass = 0; pass < num_passes; ++pass) {
    const int shift = index_bits_ + pass * digit_bits;
    position.fill(0);
    for (size_t i = 0; i < size_; ++i) ++position[(keys_[i] >> shift) & mask];
    size_t next = 0;
    for (uint64_t digit = 0; digit <= mask; ++digit) {
      const size_t count = position[digit];
      position[digit] = next;
      next += count;
    }
    for (size_t i = 0; i < size_; ++i) sorted[position[(keys_[i] >> shift) & mask]++] = keys_[i];
    keys_.swap(sorted);
  }
}

}  // namespace gba

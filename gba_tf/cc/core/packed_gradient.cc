#include "gba_tf/cc/core/packed_gradient.h"

#include <cstring>
#include <limits>
#include <utility>

#include "gba_tf/cc/core/aggregate.h"

namespace gba {
namespace {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
              "The format is written as it is in memory");

constexpr uint32_t kMagic = 0x47414247;  // "GBAG"
constexpr uint32_t kVersion = 2;
constexpr size_t kAlignment = 64;
// No size or offset that is accepted exceeds this multiple of 64, so sums of two cannot overflow.
constexpr uint64_t kMaxBytes = uint64_t{1} << 62;

struct Header {
  uint32_t magic;
  uint32_t version;
  uint64_t num_variables;
  uint64_t num_bytes;
};

// Precedes the rows of a sparse variable.
struct RowInfo {
  int64_t num_rows;
  int64_t kind;
};

int64_t RowKind(const VariableLayout& layout) { return layout.merge_rows ? 0 : 1; }

// Lays out sections one after the other. Once a size is too large, ok() is false for good.
class SectionCursor {
 public:
  // The offset of a section of `count` items. 0 if not ok().
  size_t Next(uint64_t count, uint64_t item_bytes) {
    uint64_t num_bytes;
    if (__builtin_mul_overflow(count, item_bytes, &num_bytes) || num_bytes > kMaxBytes - end_) {
      ok_ = false;
    }
    if (!ok_) return 0;
    const uint64_t offset = end_;
    end_ = (end_ + num_bytes + kAlignment - 1) / kAlignment * kAlignment;
    return offset;
  }
  bool ok() const { return ok_; }
  size_t end() const { return end_; }

 private:
  uint64_t end_ = kAlignment;  // The header has the first section.
  bool ok_ = true;
};

template <typename T>
T ReadAt(const void* base, size_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(base) + index * sizeof(T), sizeof(T));
  return value;
}

Status Invalid(size_t variable, const std::string& message) {
  return Status::InvalidArgument("Variable " + std::to_string(variable) + ": " + message);
}

std::string Text(int64_t number) { return std::to_string(number); }

Status CheckLayout(const std::vector<VariableLayout>& layout) {
  for (size_t v = 0; v < layout.size(); ++v) {
    const VariableLayout& variable = layout[v];
    if (!variable.sparse) {
      if (variable.num_elements < 0) {
        return Invalid(v, "expected at least 0 elements in the layout, found " +
                              Text(variable.num_elements) + ". Build the variable first.");
      }
      continue;
    }
    const int64_t max_rows = variable.id_type == IdType::kInt32
                                 ? int64_t{std::numeric_limits<int32_t>::max()} + 1
                                 : std::numeric_limits<int64_t>::max();
    if (variable.num_rows < 0 || variable.num_rows > max_rows) {
      return Invalid(v, "expected 0 to " + Text(max_rows) + " rows in the layout, found " +
                            Text(variable.num_rows) + ". Use int64 ids for larger variables.");
    }
    // The bound on the width keeps the bytes of a row representable.
    if (variable.row_width < 0 || (variable.row_width == 0 && variable.num_rows > 0) ||
        static_cast<uint64_t>(variable.row_width) > kMaxBytes / sizeof(double)) {
      return Invalid(v, "expected rows of at least one element in the layout, found row_width " +
                            Text(variable.row_width) + ". Check the variable's shape.");
    }
  }
  return Status();
}

Status TooLarge(size_t variable) {
  return Invalid(variable,
                 "expected a gradient of less than 2^62 bytes, found a larger one. Check "
                 "the counts.");
}

// Checks the rows of a worker's sparse gradient. Adds those that will be merged to `order`.
template <typename Id>
Status ReadRows(size_t variable, const VariableLayout& layout, const GradientInput& gradient,
                RowOrder* order) {
  for (int64_t i = 0; i < gradient.num_ids; ++i) {
    const int64_t row = ReadAt<Id>(gradient.ids, static_cast<size_t>(i));
    if (row < 0 || row >= layout.num_rows) {
      return Invalid(variable, "expected row ids in [0, " + Text(layout.num_rows) + "), found " +
                                   Text(row) + " at position " + Text(i) +
                                   ". Check the ids that the model looks up.");
    }
    if (layout.merge_rows) order->Add(row, i);
  }
  return Status();
}

Status CheckRowInfo(size_t variable, const VariableLayout& layout, const RowInfo& row_info) {
  if (row_info.kind != RowKind(layout)) {
    return Invalid(variable, "expected row kind " + Text(RowKind(layout)) + ", found " +
                                 Text(row_info.kind) +
                                 " (0: merged, 1: kept apart). Worker and parameter server must "
                                 "agree on merge_rows.");
  }
  // Merged rows are distinct; for others the size of the block is the limit.
  const int64_t max_rows =
      layout.merge_rows ? layout.num_rows : std::numeric_limits<int64_t>::max();
  if (row_info.num_rows < 0 || row_info.num_rows > max_rows) {
    return Invalid(variable, "expected 0 to " + Text(max_rows) + " rows, found " +
                                 Text(row_info.num_rows) +
                                 ". Push blocks that GradientPacker wrote.");
  }
  return Status();
}

// Checks the row ids of a packed gradient.
template <typename Id>
Status CheckIds(size_t variable, const VariableLayout& layout, const GradientView& view) {
  int64_t previous = -1;
  for (int64_t i = 0; i < view.num_ids; ++i) {
    const int64_t row = ReadAt<Id>(view.ids, static_cast<size_t>(i));
    if (row <= previous || row >= layout.num_rows) {
      return Invalid(variable, std::string("expected row ids ") +
                                   (layout.merge_rows ? "ascending, distinct and " : "") +
                                   "in [0, " + Text(layout.num_rows) + "), found " + Text(row) +
                                   (layout.merge_rows ? " after " + Text(previous) : "") +
                                   " at position " + Text(i) +
                                   ". Push blocks that GradientPacker wrote.");
    }
    if (layout.merge_rows) previous = row;
  }
  return Status();
}

Status Truncated(size_t variable, size_t expected, size_t found) {
  return Invalid(variable, "expected a block of at least " + std::to_string(expected) +
                               " bytes, found " + std::to_string(found) +
                               ". Worker and parameter server must agree on the variables.");
}

Status CheckHeader(size_t num_variables, const void* block, size_t num_bytes) {
  const std::string advice =
      ". Push blocks that GradientPacker wrote, with the same version of gba_tf.";
  if (num_bytes < kAlignment) {
    return Status::InvalidArgument("Packed gradient: expected at least 64 bytes, found " +
                                   std::to_string(num_bytes) + advice);
  }
  const Header header = ReadAt<Header>(block, 0);
  if (header.magic != kMagic) {
    return Status::InvalidArgument("Packed gradient: expected magic " + std::to_string(kMagic) +
                                   ", found " + std::to_string(header.magic) + advice);
  }
  if (header.version != kVersion) {
    return Status::InvalidArgument("Packed gradient: expected format version " +
                                   std::to_string(kVersion) + ", found " +
                                   std::to_string(header.version) + advice);
  }
  if (header.num_variables != num_variables) {
    return Status::InvalidArgument("Packed gradient: expected " + std::to_string(num_variables) +
                                   " variables, found " + std::to_string(header.num_variables) +
                                   ". Worker and parameter server must agree on the variables.");
  }
  if (header.num_bytes != num_bytes) {
    return Status::InvalidArgument("Packed gradient: expected " + std::to_string(header.num_bytes) +
                                   " bytes, as its header says, found " +
                                   std::to_string(num_bytes) + advice);
  }
  return Status();
}

}  // namespace

size_t SizeOf(ValueType type) {
  switch (type) {
    case ValueType::kFloat32:
      return 4;
    case ValueType::kFloat64:
      return 8;
    case ValueType::kFloat16:
    case ValueType::kBFloat16:
      return 2;
  }
  return 0;
}

size_t SizeOf(IdType type) { return type == IdType::kInt32 ? 4 : 8; }

Status GradientPacker::Init(const std::vector<VariableLayout>& layout,
                            std::vector<GradientInput> gradients) {
  Status status = CheckLayout(layout);
  if (!status.ok()) return status;
  if (gradients.size() != layout.size()) {
    return Status::InvalidArgument("Expected " + std::to_string(layout.size()) +
                                   " gradients, one for each variable, found " +
                                   std::to_string(gradients.size()) + ".");
  }
  std::vector<Sections> all_sections(layout.size());
  SectionCursor cursor;
  for (size_t v = 0; v < layout.size(); ++v) {
    const VariableLayout& variable = layout[v];
    const GradientInput& gradient = gradients[v];
    Sections& sections = all_sections[v];
    uint64_t num_values = static_cast<uint64_t>(variable.num_elements);
    uint64_t num_items = num_values;
    uint64_t item_bytes = SizeOf(variable.value_type);
    if (variable.sparse) {
      if (gradient.num_ids < 0) {
        return Invalid(v, "expected at least 0 row ids, found " + Text(gradient.num_ids) + ".");
      }
      if (gradient.num_ids > 0 && gradient.ids == nullptr) {
        return Invalid(v, "expected " + Text(gradient.num_ids) + " row ids, found none.");
      }
      if (variable.merge_rows) {
        status = sections.order.Init(variable.num_rows, gradient.num_ids, gradient.num_ids);
        if (!status.ok()) return Invalid(v, status.message());
      }
      status = variable.id_type == IdType::kInt32
                   ? ReadRows<int32_t>(v, variable, gradient, &sections.order)
                   : ReadRows<int64_t>(v, variable, gradient, &sections.order);
      if (!status.ok()) return status;
      sections.num_rows = gradient.num_ids;
      if (variable.merge_rows) {
        sections.order.Sort();
        sections.num_rows = sections.order.num_distinct();
      }
      num_values = static_cast<uint64_t>(gradient.num_ids);
      num_items = static_cast<uint64_t>(sections.num_rows);
      item_bytes *= static_cast<uint64_t>(variable.row_width);
      sections.row_info = cursor.Next(1, sizeof(RowInfo));
      sections.ids = cursor.Next(num_items, SizeOf(variable.id_type));
    }
    if (num_values > 0 && gradient.values == nullptr) {
      return Invalid(v, "expected values, found none.");
    }
    sections.values = cursor.Next(num_items, item_bytes);
    if (!cursor.ok()) return TooLarge(v);
  }
  layout_ = layout;
  gradients_ = std::move(gradients);
  sections_ = std::move(all_sections);
  packed_bytes_ = cursor.end();
  return Status();
}

void GradientPacker::Write(void* destination) const {
  char* block = static_cast<char*>(destination);
  size_t written = 0;
  // Zeroes the gap before a section, so that equal gradients make equal blocks.
  const auto begin_section = [&](size_t offset) {
    std::memset(block + written, 0, offset - written);
    return block + offset;
  };
  const Header header{kMagic, kVersion, layout_.size(), packed_bytes_};
  std::memcpy(block, &header, sizeof(header));
  written = sizeof(header);
  for (size_t v = 0; v < layout_.size(); ++v) {
    const VariableLayout& variable = layout_[v];
    const Sections& sections = sections_[v];
    const size_t value_bytes = SizeOf(variable.value_type);
    if (!variable.sparse) {
      const size_t num_bytes = static_cast<size_t>(variable.num_elements) * value_bytes;
      char* values = begin_section(sections.values);
      if (num_bytes > 0) std::memcpy(values, gradients_[v].values, num_bytes);
      written = sections.values + num_bytes;
      continue;
    }
    const RowInfo row_info{sections.num_rows, RowKind(variable)};
    std::memcpy(begin_section(sections.row_info), &row_info, sizeof(row_info));
    written = sections.row_info + sizeof(row_info);
    const size_t num_rows = static_cast<size_t>(sections.num_rows);
    const size_t ids_bytes = num_rows * SizeOf(variable.id_type);
    char* ids = begin_section(sections.ids);
    written = sections.ids + ids_bytes;
    const size_t values_bytes = num_rows * static_cast<size_t>(variable.row_width) * value_bytes;
    char* values = begin_section(sections.values);
    written = sections.values + values_bytes;
    if (variable.merge_rows) {
      SumRepeatedRows(variable, sections.order, gradients_[v].values, ids, values);
    } else if (num_rows > 0) {
      std::memcpy(ids, gradients_[v].ids, ids_bytes);
      std::memcpy(values, gradients_[v].values, values_bytes);
    }
  }
  begin_section(packed_bytes_);
}

Status ParsePackedGradient(const std::vector<VariableLayout>& layout, const void* block,
                           size_t num_bytes, std::vector<GradientView>* views) {
  Status status = CheckLayout(layout);
  if (!status.ok()) return status;
  status = CheckHeader(layout.size(), block, num_bytes);
  if (!status.ok()) return status;
  const char* bytes = static_cast<const char*>(block);
  std::vector<GradientView> found(layout.size());
  SectionCursor cursor;
  for (size_t v = 0; v < layout.size(); ++v) {
    const VariableLayout& variable = layout[v];
    GradientView& view = found[v];
    uint64_t num_items = static_cast<uint64_t>(variable.num_elements);
    uint64_t item_bytes = SizeOf(variable.value_type);
    if (variable.sparse) {
      const size_t row_info_offset = cursor.Next(1, sizeof(RowInfo));
      if (!cursor.ok()) return TooLarge(v);
      if (cursor.end() > num_bytes) return Truncated(v, cursor.end(), num_bytes);
      const RowInfo row_info = ReadAt<RowInfo>(bytes + row_info_offset, 0);
      status = CheckRowInfo(v, variable, row_info);
      if (!status.ok()) return status;
      view.num_ids = row_info.num_rows;
      num_items = static_cast<uint64_t>(view.num_ids);
      item_bytes *= static_cast<uint64_t>(variable.row_width);
      view.ids = bytes + cursor.Next(num_items, SizeOf(variable.id_type));
    }
    const size_t values = cursor.Next(num_items, item_bytes);
    if (!cursor.ok()) return TooLarge(v);
    if (cursor.end() > num_bytes) return Truncated(v, cursor.end(), num_bytes);
    view.values = bytes + values;
    if (variable.sparse) {
      status = variable.id_type == IdType::kInt32 ? CheckIds<int32_t>(v, variable, view)
                                                  : CheckIds<int64_t>(v, variable, view);
      if (!status.ok()) return status;
    }
  }
  if (cursor.end() != num_bytes) {
    return Status::InvalidArgument("Packed gradient: expected " + std::to_string(cursor.end()) +
                                   " bytes for this layout, found " + std::to_string(num_bytes) +
                                   ". Worker and parameter server must agree on the variables.");
  }
  *views = std::move(found);
  return Status();
}

}  // namespace gba

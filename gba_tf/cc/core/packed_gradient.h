// One worker's gradient for one parameter server as a single block of bytes: one message on the
// wire and one allocation, however many variables there are.
//
// Layout, little-endian, every section aligned to 64 bytes from the start of the block:
//   header:   magic (uint32), version (uint32), number of variables (uint64), total bytes (uint64)
//   per variable, in the order of the layout:
//     dense:  one section, num_elements values
//     sparse: three sections, the row count r and the row kind (int64 each), r row ids, and
//             r * row_width values
// The block ends at the end of its last section, rounded up to 64. Gaps are zero.
//
// Row kind 0: ids are ascending and distinct. Rows that occur several times in a sparse gradient
// were summed by the packer, in order of occurrence (float16 and bfloat16 in float32, rounded
// once). Row kind 1: ids and values are just those of the worker.
#ifndef GBA_TF_CC_CORE_PACKED_GRADIENT_H_
#define GBA_TF_CC_CORE_PACKED_GRADIENT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "gba_tf/cc/core/row_order.h"
#include "gba_tf/cc/core/status.h"

namespace gba {

enum class ValueType { kFloat32, kFloat64, kFloat16, kBFloat16 };
enum class IdType { kInt32, kInt64 };

// Bytes of one value or id.
size_t SizeOf(ValueType type);
size_t SizeOf(IdType type);

// What the buffer knows of one variable.
struct VariableLayout {
  ValueType value_type = ValueType::kFloat32;
  bool sparse = false;
  int64_t num_elements = 0;  // Dense: of the variable.
  int64_t num_rows = 0;      // Sparse: of the variable; ids are in [0, num_rows).
  int64_t row_width = 0;     // Sparse: elements of a row. May be 0 only for an empty variable.
  IdType id_type = IdType::kInt64;  // Sparse.
  // Sparse: whether the occurrences of a row are summed. If not they all stay apart, within a
  // gradient and between gradients, as they do in plain Keras until after it has clipped.
  bool merge_rows = true;
};

// A gradient of one variable as the worker computed it. Sparse: ids may repeat, in any order.
struct GradientInput {
  const void* values = nullptr;
  const void* ids = nullptr;  // Sparse only.
  int64_t num_ids = 0;        // Sparse only.
};

// Where one variable's gradient lies in a packed block.
struct GradientView {
  const void* values = nullptr;
  const void* ids = nullptr;  // Sparse only: ascending and distinct if the rows are merged.
  int64_t num_ids = 0;        // Sparse only.
};

// Packs one gradient. Two calls because the caller owns the memory: Init, allocate packed_bytes()
// bytes (aligned to 64 for speed; any address works), Write.
class GradientPacker {
 public:
  // Checks, sorts and counts the rows. Inputs must outlive the packer. Returns InvalidArgument
  // naming the variable's index for a row id outside [0, num_rows) or a count that does not fit the
  // layout.
  Status Init(const std::vector<VariableLayout>& layout, std::vector<GradientInput> gradients);
  size_t packed_bytes() const { return packed_bytes_; }
  void Write(void* destination) const;

 private:
  // Where a variable's sections begin, in bytes from the start of the block.
  struct Sections {
    size_t row_info = 0;  // Sparse only.
    size_t ids = 0;       // Sparse only.
    size_t values = 0;
    int64_t num_rows = 0;  // Sparse only: as packed.
    RowOrder order;        // Sparse only, and only if the rows are merged.
  };

  std::vector<VariableLayout> layout_;
  std::vector<GradientInput> gradients_;
  std::vector<Sections> sections_;
  size_t packed_bytes_ = 0;
};

// Finds the variables in a packed block, at any address; the views point into it. Returns
// InvalidArgument, saying what was expected and found, for anything that a packer with this layout
// could not have written (size, magic, version, counts, row kind, ids out of range or, if the rows
// are merged, not ascending).
Status ParsePackedGradient(const std::vector<VariableLayout>& layout, const void* block,
                           size_t num_bytes, std::vector<GradientView>* views);

}  // namespace gba

#endif  // GBA_TF_CC_CORE_PACKED_GRADIENT_H_

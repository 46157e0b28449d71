// Holds the gradients of one parameter server until their global step is applied, and sums them.
//
// A pushed gradient is kept as its packed block, not copied, until the step that contains it was
// applied or it is known that it will never be used. The sum is formed when the step is applied, in
// ascending order of token ids, so a given set of gradients always gives the same bits.
#ifndef GBA_TF_CC_CORE_GRADIENT_BUFFER_H_
#define GBA_TF_CC_CORE_GRADIENT_BUFFER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "gba_tf/cc/core/packed_gradient.h"
#include "gba_tf/cc/core/row_order.h"
#include "gba_tf/cc/core/status.h"
#include "gba_tf/cc/core/token.h"

namespace gba {

// Bytes and whatever keeps them alive (a tensor's buffer, a string).
struct Block {
  const void* data = nullptr;
  size_t num_bytes = 0;
  std::shared_ptr<const void> owner;
};

// The update of one step: sum_m(w_m * g_m) / divisor for each variable, before it is written.
// Made by GradientBuffer::Prepare; tells the caller how much memory to allocate for a sparse
// variable; holds the blocks alive, whatever happens to the buffer. Variables may be written from
// several threads at once.
class PreparedUpdate {
 public:
  // Rows of a sparse variable over all gradients of weight 1: distinct ones if rows are merged,
  // else all occurrences. 0 for a dense variable.
  int64_t num_rows(size_t variable) const;
  // Writes the num_elements values of a dense variable, in its value type.
  void WriteDense(size_t variable, void* values) const;
  // Writes num_rows() ids in the layout's id type and num_rows() * row_width values. Merged rows
  // ascend; others follow as they are in the gradients, in token-id order, each divided alone.
  void WriteSparse(size_t variable, void* ids, void* values) const;

 private:
  friend class GradientBuffer;

  struct Variable {
    VariableLayout layout;
    std::vector<GradientView> gradients;  // Those of weight 1, in token-id order.
    int64_t num_rows = 0;
    RowOrder order;                     // Merged rows: which gradient has which row.
    int64_t divisor = 1;                // As SumDense and SumSources take it.
    std::vector<int64_t> row_divisors;  // Rows kept apart: one each, if they are not all `divisor`.
  };

  static void WriteRowsApart(const Variable& variable, char* ids, char* values);

  std::vector<Variable> variables_;
  std::vector<std::shared_ptr<const void>> owners_;
};

struct BufferStats {
  int64_t num_gradients = 0;
  int64_t num_bytes = 0;
};

// How a row of a sparse gradient is averaged.
enum class SparseDivisor {
  kGradientsPerUpdate,  // The step's divisor: equals synchronous training. The default.
  // The number of gradients of weight 1 that contain the row, once or more. Where rows are kept
  // apart each occurrence is divided by it, so that they still add up to the row's merged value.
  kGradientsWithRow,
};

// Thread-safe. No method blocks on anything but a short mutex; sums are formed outside it.
class GradientBuffer {
 public:
  GradientBuffer(std::vector<VariableLayout> layout, SparseDivisor sparse_divisor);
  GradientBuffer(const GradientBuffer&) = delete;
  GradientBuffer& operator=(const GradientBuffer&) = delete;

  // Keeps the gradient of token `id`. Pushing the same id again replaces it, so a repeated push is
  // harmless. Returns InvalidArgument, and keeps nothing, if the block does not fit the layout.
  Status Push(TokenId id, Block block);

  // Collects the gradients of a closed step. Returns NotFound naming the missing token if one of
  // weight 1 was not pushed here (one of weight 0 need not be here), and InvalidArgument for a step
  // that no token server hands out (ids not ascending, weights other than 0 and 1, divisor < 1).
  Status Prepare(const ClosedStep& step, PreparedUpdate* update) const;

  // Frees the gradients of a step that was applied, and every gradient whose id is below
  // `oldest_live_id` and not in `keep` (steps that are closed and not yet applied here).
  void Release(const ClosedStep& applied, TokenId oldest_live_id,
               const std::vector<ClosedStep>& keep);

  // Frees given-up gradients. Unknown ids are ignored.
  void Drop(const std::vector<TokenId>& ids);

  BufferStats stats() const;

  // All gradients with their ids, for saving; blocks are shared, not copied.
  std::vector<std::pair<TokenId, Block>> Snapshot() const;
  // Replaces the content. Returns InvalidArgument, and changes nothing, if a block does not fit the
  // layout or an id occurs twice.
  Status Restore(std::vector<std::pair<TokenId, Block>> gradients);

 private:
  // A gradient and where its variables lie in the block. Immutable.
  struct Gradient {
    Block block;
    std::vector<GradientView> views;
  };
  using GradientMap = std::map<TokenId, std::shared_ptr<const Gradient>>;

  Status Parse(TokenId id, Block block, std::shared_ptr<const Gradient>* gradient) const;
  // Moves gradients out of `gradients_`, to be freed when the lock is released.
  // Requires mu_.
  GradientMap::iterator Extract(GradientMap::iterator position, GradientMap* removed);

  const std::vector<VariableLayout> layout_;
  const SparseDivisor sparse_divisor_;
  mutable std::mutex mu_;
  GradientMap gradients_;  // Guarded by mu_.
  int64_t num_bytes_ = 0;  // Of all blocks in gradients_. Guarded by mu_.
};

}  // namespace gba

#endif  // GBA_TF_CC_CORE_GRADIENT_BUFFER_H_

// The rule of a training mode, apart from the storage: how many gradients make up an update, and
// what a stale gradient is worth. This is the one place to change the staleness rule.
#ifndef GBA_TF_CC_CORE_POLICY_H_
#define GBA_TF_CC_CORE_POLICY_H_

#include <cstdint>

#include "gba_tf/cc/core/status.h"
#include "gba_tf/cc/core/token.h"

namespace gba {

// Immutable; safe to call from any thread.
class Policy {
 public:
  virtual ~Policy() = default;

  // M, the number of committed gradients that closes a global step. At least 1.
  virtual int64_t capacity() const = 0;

  // The weight, 0 or 1, of a gradient with token value `value` in the update of global step `step`.
  virtual float Weight(GlobalStep step, GlobalStep value) const = 0;
};

// GBA (arXiv 2205.11048, section 4): weight 1 if step - value <= staleness_tolerance, else 0.
class GbaPolicy final : public Policy {
 public:
  // Returns InvalidArgument unless gradients_per_update >= 1 and staleness_tolerance >= 0.
  static Status Validate(int64_t gradients_per_update, int64_t staleness_tolerance);

  GbaPolicy(int64_t gradients_per_update, int64_t staleness_tolerance);

  int64_t capacity() const override { return gradients_per_update_; }
  float Weight(GlobalStep step, GlobalStep value) const override;

 private:
  const int64_t gradients_per_update_;
  const int64_t staleness_tolerance_;
};

}  // namespace gba

#endif  // GBA_TF_CC_CORE_POLICY_H_

#include "gba_tf/cc/core/policy.h"

#include <string>

namespace gba {

Status GbaPolicy::Validate(int64_t gradients_per_update, int64_t staleness_tolerance) {
  if (gradients_per_update < 1) {
    return Status::InvalidArgument(
        "gradients_per_update: expected at least 1, found " + std::to_string(gradients_per_update) +
        ". It is global_batch_size / local_batch_size; make the global batch a multiple of the "
        "local one.");
  }
  if (staleness_tolerance < 0) {
    return Status::InvalidArgument(
        "staleness_tolerance: expected at least 0 global steps, found " +
        std::to_string(staleness_tolerance) +
        ". 0 keeps only the gradients of the step that is being closed.");
  }
  return Status();
}

GbaPolicy::GbaPolicy(int64_t gradients_per_update, int64_t staleness_tolerance)
    : gradients_per_update_(gradients_per_update), staleness_tolerance_(staleness_tolerance) {}

float GbaPolicy::Weight(GlobalStep step, GlobalStep value) const {
  return step - value <= staleness_tolerance_ ? 1.0f : 0.0f;
}

}  // namespace gba

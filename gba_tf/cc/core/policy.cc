#include "gba_tf/cc/core/policy.h"

namespace gba {
namespace {

std::string NameAndCapacity(const Policy& policy) {
  return policy.name() + " with M = " + std::to_string(policy.capacity());
}

}  // namespace

GbaPolicy::GbaPolicy(int64_t gradients_per_update, int64_t staleness_tolerance)
    : gradients_per_update_(gradients_per_update), staleness_tolerance_(staleness_tolerance) {}

std::string GbaPolicy::Describe() const {
  return NameAndCapacity(*this) + " and staleness tolerance " +
         std::to_string(staleness_tolerance_);
}

float GbaPolicy::Weight(GlobalStep step, GlobalStep value) const {
  return step - value <= staleness_tolerance_ ? 1.0f : 0.0f;
}

BspPolicy::BspPolicy(int64_t gradients_per_update) : gradients_per_update_(gradients_per_update) {}

std::string BspPolicy::Describe() const { return NameAndCapacity(*this); }

HopBsPolicy::HopBsPolicy(int64_t staleness_bound) : staleness_bound_(staleness_bound) {}

std::string HopBsPolicy::Describe() const {
  return NameAndCapacity(*this) + " and staleness bound " + std::to_string(staleness_bound_);
}

bool HopBsPolicy::Admits(const WorkerStanding& worker) const {
  return worker.committed + 1 - worker.least_committed <= staleness_bound_;
}

HopBwPolicy::HopBwPolicy(int64_t gradients_per_update)
    : gradients_per_update_(gradients_per_update) {}

std::string HopBwPolicy::Describe() const { return NameAndCapacity(*this); }

GlobalStep HopBwPolicy::TokenValue(GlobalStep step, int64_t) const { return step; }

bool HopBwPolicy::Accepts(GlobalStep step, GlobalStep value) const { return step == value; }

bool HopBwPolicy::Admits(const WorkerStanding& worker) const {
  return !worker.has_open_gradient && !worker.update_is_pending;
}

Status MakePolicy(const PolicySettings& settings, std::unique_ptr<const Policy>* policy) {
  const std::string& name = settings.name;
  const int64_t capacity = settings.gradients_per_update;
  if (name != "gba" && name != "bsp" && name != "hop_bs" && name != "hop_bw") {
    return Status::InvalidArgument("policy: expected one of gba, bsp, hop_bs, hop_bw, found '" +
                                   name + "'.");
  }
  if (capacity < 1) {
    return Status::InvalidArgument(
        "gradients_per_update: expected at least 1, found " + std::to_string(capacity) +
        (name == "hop_bw" ? ". It is the number of workers less the backup workers; have fewer "
                            "backup workers than workers."
                          : ". It is global_batch_size / local_batch_size; make the global batch a "
                            "multiple of the local one."));
  }
  if (name == "gba") {
    if (settings.staleness_tolerance < 0) {
      return Status::InvalidArgument(
          "staleness_tolerance: expected at least 0 global steps, found " +
          std::to_string(settings.staleness_tolerance) +
          ". 0 keeps only the gradients of the step that is being closed.");
    }
    *policy = std::make_unique<GbaPolicy>(capacity, settings.staleness_tolerance);
  } else if (name == "bsp") {
    *policy = std::make_unique<BspPolicy>(capacity);
  } else if (name == "hop_bw") {
    *policy = std::make_unique<HopBwPolicy>(capacity);
  } else {
    if (capacity != 1) {
      return Status::InvalidArgument(
          "gradients_per_update: expected 1 for hop_bs, where every gradient is an update, found " +
          std::to_string(capacity) + ".");
    }
    if (settings.staleness_bound < 1) {
      return Status::InvalidArgument(
          "staleness_bound: expected at least 1 gradient, found " +
          std::to_string(settings.staleness_bound) +
          ". A worker that may not be ahead of the slowest one could never commit first.");
    }
    *policy = std::make_unique<HopBsPolicy>(settings.staleness_bound);
  }
  return Status();
}

}  // namespace gba

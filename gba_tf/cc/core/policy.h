// The rules of the training modes, apart from the storage: how many gradients make up an update,
// who may take a token, what a token stands for, and what a late gradient is worth. This is the one
// place to change a staleness rule.
//
// M: the capacity, gradients per update. k: the current global step, the one that is open. c_i: the
// committed gradients of worker i. Busy workers are those that have work, see worker_table.h.
//
// clang-format off
//   name    M      value of a token          a worker is admitted      a gradient k - value late
//   gba     M      k + floor(in flight / M)  always                    1 up to iota, else 0
//   bsp     M      k + floor(in flight / M)  always                    1
//   hop_bs  1      k + in flight             c_i + 1 - min_busy(c)     1
//                                            <= bound
//   hop_bw  N - b  k                         all closed steps are      1 if value == k,
//                                            applied, and the open     else dropped
//                                            one has none of its
//                                            gradients
// clang-format on
//
// In flight: outstanding and buffered gradients. hop_bs is bounded staleness: what a worker commits
// never leads the slowest busy one by more than `bound` gradients. hop_bw has N workers and b
// backups: a step closes with the first N - b gradients, and a later one takes no place. Without
// backups it is synchronous training as long as all workers have work: nobody waits for one that
// has none, as in the beginning, when the first worker that gets a step may be alone. It then has
// several places in a step, and the gradient of a worker that joins meanwhile may be dropped. bsp
// with M = 1 is plain asynchronous training.
//
// Example, hop_bs with bound 2 and busy workers a, b: a commits twice (c_a = 2, c_b = 0) and is not
// admitted, 2 + 1 - 0 > 2, until b has committed: 2 + 1 - 1 <= 2.
// Example, hop_bw with M = 2 and workers a, b, c: all take tokens of value 0; a and b commit, which
// closes step 0; c commits, value 0 in step 1, and is dropped. From its commit until step 0 is
// applied, a was not admitted.
#ifndef GBA_TF_CC_CORE_POLICY_H_
#define GBA_TF_CC_CORE_POLICY_H_

#include <cstdint>
#include <memory>
#include <string>

#include "gba_tf/cc/core/status.h"
#include "gba_tf/cc/core/token.h"

namespace gba {

// What a policy may look at when a worker wants a token.
struct WorkerStanding {
  int64_t committed = 0;           // c_i.
  int64_t least_committed = 0;     // min over the busy workers.
  bool has_open_gradient = false;  // A gradient of the worker is in the step that is open.
  bool update_is_pending = false;  // A closed step is not marked as applied.
};

// Immutable; safe to call from any thread.
class Policy {
 public:
  virtual ~Policy() = default;

  // As in the table above; at most 8 bytes, because saved states name it.
  virtual std::string name() const = 0;
  // The name and every setting: equal for equal policies.
  virtual std::string Describe() const = 0;

  // M, the number of committed gradients that closes a global step. At least 1.
  virtual int64_t capacity() const = 0;

  // The weight, 0 or 1, of a gradient with token value `value` in the update of global step `step`.
  virtual float Weight(GlobalStep, GlobalStep) const { return 1.0f; }

  // The value of a token that is taken in global step `step` with `in_flight` gradients outstanding
  // or buffered.
  virtual GlobalStep TokenValue(GlobalStep step, int64_t in_flight) const {
    return step + in_flight / capacity();
  }

  // Whether a gradient with token value `value` takes a place in the buffer of `step`. If not it is
  // decayed at its commit.
  virtual bool Accepts(GlobalStep, GlobalStep) const { return true; }

  // Whether Admits is ever false.
  virtual bool waits() const { return false; }
  // Whether a worker may take a token now, or has to wait.
  virtual bool Admits(const WorkerStanding&) const { return true; }
};

// GBA (arXiv 2205.11048, section 4): weight 1 if step - value <= staleness_tolerance, else 0.
class GbaPolicy final : public Policy {
 public:
  GbaPolicy(int64_t gradients_per_update, int64_t staleness_tolerance);

  std::string name() const override { return "gba"; }
  std::string Describe() const override;
  int64_t capacity() const override { return gradients_per_update_; }
  float Weight(GlobalStep step, GlobalStep value) const override;

 private:
  const int64_t gradients_per_update_;
  const int64_t staleness_tolerance_;
};

// As many gradients as in synchronous training, whatever their age.
class BspPolicy final : public Policy {
 public:
  explicit BspPolicy(int64_t gradients_per_update);

  std::string name() const override { return "bsp"; }
  std::string Describe() const override;
  int64_t capacity() const override { return gradients_per_update_; }

 private:
  const int64_t gradients_per_update_;
};

// Bounded staleness: every gradient is an update, and the fastest worker waits for the slowest.
class HopBsPolicy final : public Policy {
 public:
  explicit HopBsPolicy(int64_t staleness_bound);

  std::string name() const override { return "hop_bs"; }
  std::string Describe() const override;
  int64_t capacity() const override { return 1; }
  bool waits() const override { return true; }
  bool Admits(const WorkerStanding& worker) const override;

 private:
  const int64_t staleness_bound_;
};

// Backup workers: a step closes with the first gradients, and the late ones are dropped.
class HopBwPolicy final : public Policy {
 public:
  explicit HopBwPolicy(int64_t gradients_per_update);

  std::string name() const override { return "hop_bw"; }
  std::string Describe() const override;
  int64_t capacity() const override { return gradients_per_update_; }
  GlobalStep TokenValue(GlobalStep step, int64_t in_flight) const override;
  bool Accepts(GlobalStep step, GlobalStep value) const override;
  bool waits() const override { return true; }
  bool Admits(const WorkerStanding& worker) const override;

 private:
  const int64_t gradients_per_update_;
};

// A policy by its name. What a policy has no use for is not looked at.
struct PolicySettings {
  std::string name;
  int64_t gradients_per_update = 1;  // M. Of hop_bs it has to be 1.
  int64_t staleness_tolerance = 0;   // gba: iota, in global steps.
  int64_t staleness_bound = 1;       // hop_bs: gradients.
};

// Returns InvalidArgument, and leaves `policy` alone, if the name is unknown, or unless
// gradients_per_update >= 1, staleness_tolerance >= 0 and staleness_bound >= 1: with a bound of 0
// no worker could ever take a token.
Status MakePolicy(const PolicySettings& settings, std::unique_ptr<const Policy>* policy);

}  // namespace gba

#endif  // GBA_TF_CC_CORE_POLICY_H_

// What a token server knows of the workers: who has work, how much each has committed, how long its
// gradients take.
//
// A worker is busy from the moment it joins, or takes a token, until it leaves or is given up.
// Others may have to wait for a busy worker, so one without work must leave. One that joins again
// starts no lower than the slowest busy worker stands or, where nobody is busy, stood last: what it
// did not do while it was away holds nobody up, and nobody is further ahead of it than of others.
#ifndef GBA_TF_CC_CORE_WORKER_TABLE_H_
#define GBA_TF_CC_CORE_WORKER_TABLE_H_

#include <cstdint>
#include <map>
#include <vector>

#include "gba_tf/cc/core/policy.h"
#include "gba_tf/cc/core/token.h"

namespace gba {

// How long the gradients of a worker task took, from the token's hand-over to the commit.
struct WorkerSeconds {
  int64_t task = 0;
  int64_t gradients = 0;
  double seconds = 0;  // The sum.
};

// Not thread-safe.
class WorkerTable {
 public:
  // The worker has work.
  void Join(int64_t task);
  // Like Join, for a worker that takes a token. Not for a process that was given up: a request of a
  // dead worker may arrive late, and nobody shall wait for it.
  void Arrive(WorkerId worker);
  // The worker has no work.
  void Leave(int64_t task);
  // The worker is dead, or thought to be.
  void GiveUp(int64_t task);

  // The worker has committed a gradient that took `seconds`. Whoever commits is alive.
  void Commit(int64_t task, double seconds);
  // A gradient of the worker is in the buffer of `step`.
  void SetBuffered(int64_t task, GlobalStep step);
  // Nobody's gradient is known to be in a buffer any more: another state was restored.
  void ForgetBuffered();

  bool IsBusy(int64_t task) const;
  int64_t num_busy() const { return num_busy_; }
  WorkerStanding StandingOf(int64_t task, GlobalStep step);
  // Ascending by task; those that have committed at least once.
  std::vector<WorkerSeconds> seconds() const;

 private:
  static constexpr GlobalStep kNone = -1;
  struct Worker {
    bool busy = false;
    bool given_up = false;  // And not heard of since.
    int64_t incarnation = 0;
    int64_t committed = 0;  // c_i, raised where it joined.
    GlobalStep buffered_in = kNone;
    int64_t gradients = 0;
    double seconds = 0;
  };

  void SetBusy(Worker* worker);
  void SetIdle(Worker* worker);
  int64_t LeastCommitted();

  std::map<int64_t, Worker> workers_;  // By task.
  int64_t num_busy_ = 0;
  // The highest minimum of the busy workers so far. No busy worker is below it.
  int64_t floor_ = 0;
};

}  // namespace gba

#endif  // GBA_TF_CC_CORE_WORKER_TABLE_H_

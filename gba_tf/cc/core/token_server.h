// Issues tokens, counts what becomes of them, and closes global steps.
//
// Lives on parameter server task 0 of a run. Every token is at all times in exactly one state:
//
//   Take -> outstanding -> Commit -> buffered -> (the step closes) -> applied (weight 1)
//                |            \-> (the policy does not accept it)  \-> decayed (weight 0)
//                |                \-> decayed
//                \-> GiveUp, or its worker takes again -> lost
//
//   issued == applied + decayed + lost + outstanding + buffered.
//
// A step that is closed stays in the list of unapplied steps until MarkApplied: whoever closes a
// later step, or commits after the closing worker was given up or took another token, is handed it
// again. A worker that dies while it applies an update therefore never blocks the next one.
// Parameter servers apply a step once, however often it is handed out.
//
// A policy can make a worker wait for its token. Liveness: when every busy worker waits, so that no
// commit can end it, the one that has waited longest is let through.
//
// Example, with GbaPolicy(gradients_per_update=2, staleness_tolerance=4) and workers a and b:
//   Take(a) -> {id 0, value 0};  Take(b) -> {id 1, value 0};  Commit(1) -> nothing to apply;
//   Take(b) -> {id 2, value 1};  Commit(0) -> apply {step 0, ids {0, 1}, weights {1, 1}, divisor
//   2}.
#ifndef GBA_TF_CC_CORE_TOKEN_SERVER_H_
#define GBA_TF_CC_CORE_TOKEN_SERVER_H_

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "gba_tf/cc/core/policy.h"
#include "gba_tf/cc/core/status.h"
#include "gba_tf/cc/core/token.h"
#include "gba_tf/cc/core/token_state.h"
#include "gba_tf/cc/core/worker_table.h"

namespace gba {

struct TokenStats {
  int64_t issued = 0;
  int64_t applied = 0;
  int64_t decayed = 0;
  int64_t lost = 0;
  int64_t outstanding = 0;
  int64_t buffered = 0;
  GlobalStep global_step = 0;            // Closed steps.
  int64_t unapplied_steps = 0;           // Closed, and not yet marked as applied.
  int64_t waiting = 0;                   // Calls of Take that wait. They hold no token.
  std::map<int64_t, int64_t> staleness;  // step - value at the close -> number of gradients.
};

struct CommitOutcome {
  // False if the token had been given up or was committed before, so that the gradient does not
  // count (again), or if the policy did not accept it.
  bool counted = false;
  // Closed steps the caller has to apply on every parameter server, in this order, and then to mark
  // as applied: all that are unapplied, or none. Empty for most commits.
  std::vector<ClosedStep> to_apply;
  // Gradients with a smaller id that are in no unapplied step will never be used: their memory can
  // be freed.
  TokenId oldest_live_id = 0;
};

// Thread-safe. No method blocks on anything but a short mutex; a Take that has to wait is kept, and
// whichever call ends the wait calls its callback, in that call's thread and outside the mutex.
class TokenServer {
 public:
  // Seconds since some moment. Never goes back.
  using Clock = std::function<double()>;
  // Ok and the token, or Cancelled and no token.
  using TakeCallback = std::function<void(const Status& status, const Token& token)>;
  // Names a Take that waits.
  using TakeTicket = int64_t;
  // Called under the mutex, so that it must not call this object, when a Take is about to wait;
  // false ends it with Cancelled instead. From its return on, CancelTake(ticket) ends the wait.
  using MayWait = std::function<bool(TakeTicket ticket)>;

  explicit TokenServer(std::unique_ptr<const Policy> policy, Clock clock = SteadySeconds);
  // Ends every wait with Cancelled.
  ~TokenServer();
  TokenServer(const TokenServer&) = delete;
  TokenServer& operator=(const TokenServer&) = delete;

  static double SteadySeconds();
  const Policy& policy() const { return *policy_; }

  // Issues a token once the policy admits the worker, with the policy's value: for gba it is
  // global_step + floor((buffered + outstanding) / M), which is floor((committed + outstanding) /
  // M) as long as no partial buffer was applied. The worker is busy from here on. It computes one
  // gradient at a time: a token that `worker.task` still holds, in whatever incarnation, is given
  // up first, a Take of its that waits is cancelled, and the steps that it had to apply are made
  // available to the next commit.
  //
  // `callback` is called exactly once: before this returns if the worker is admitted at once, as it
  // always is where the policy does not wait. A wait ends with a token by a commit, a closed step,
  // MarkApplied, Leave, GiveUp, Restore or, where it makes the last busy worker wait, a Take; and
  // with Cancelled by CancelTake, GiveUp of this worker, another Take of this task, or the end of
  // the server.
  void Take(WorkerId worker, TakeCallback callback, const MayWait& may_wait = nullptr);

  // Ends a waiting Take with Cancelled. Does nothing if it does not wait any more.
  void CancelTake(TakeTicket ticket);

  // The worker task has work, or has none: others may have to wait for it, or need not. A worker
  // that joins again starts no lower than the slowest busy one, see worker_table.h.
  void Join(int64_t worker_task);
  void Leave(int64_t worker_task);

  // Counts the gradient of `id`; the M-th one closes the global step. Never waits. The closing
  // commit is handed every unapplied step; another one only if the worker that closed one of them
  // was given up or took another token, or the state was restored, before it was marked as applied.
  // Returns NotFound if `id` was never issued.
  Status Commit(TokenId id, CommitOutcome* outcome);

  // Gives up the token that the worker task holds and makes the steps that it had to apply
  // available to the next commit. The worker is not waited for any more, and a Take of its that
  // waits ends with Cancelled. Called when the worker is known to be dead; harmless when it is not:
  // it will be told at its commit. Returns the ids that are now lost.
  std::vector<TokenId> GiveUp(int64_t worker_task);

  // `step` and all steps before it have been applied on every parameter server.
  // Returns FailedPrecondition if `step` is not closed yet.
  Status MarkApplied(GlobalStep step);

  // Hands out every unapplied step. With `close_partial`, as at the end of training, closes the
  // partial buffer first, if there is one, with divisor = its number of gradients. `counted` is
  // false.
  CommitOutcome Flush(bool close_partial);

  TokenStats stats() const;

  // For each worker task that has committed, ascending: the gradients it committed, late ones that
  // were not accepted included, and the seconds they took from the hand-over of the token on. The
  // wait for a token is not part of it.
  std::vector<WorkerSeconds> worker_seconds() const;

  // The whole state as bytes, with a format version and a checksum. Outstanding tokens are saved as
  // lost: the workers that hold them do not survive a restore. Of the workers nothing is saved.
  std::string Serialize() const;
  // Replaces the state; the next commit is handed the unapplied steps. On error nothing is changed
  // and InvalidArgument says what is wrong with `bytes` (truncated, checksum, version, another
  // policy or M).
  Status Restore(const std::string& bytes);

 private:
  struct WaitingTake {
    TakeTicket ticket;
    WorkerId worker;
    TakeCallback callback;
  };
  // What is left to do once mu_ is released.
  struct EndedTake {
    TakeCallback callback;
    Status status;
    Token token;
  };
  using EndedTakes = std::vector<EndedTake>;
  static void CallBack(const EndedTakes& ended);

  // All of these require mu_.
  Token Issue(int64_t worker_task);
  // Issues tokens to those that need not wait any more.
  void AdmitWaiting(EndedTakes* ended);
  bool EveryBusyWorkerWaits() const;
  void CancelWaitOf(int64_t worker_task, const char* why, EndedTakes* ended);
  void LoseTokenOf(int64_t worker_task, std::vector<TokenId>* lost);
  void OrphanStepsOf(int64_t worker_task);
  // Closes a global step with every buffered gradient.
  void CloseStep(int64_t divisor, std::optional<int64_t> closing_task);
  std::vector<ClosedStep> UnappliedSteps() const;
  TokenId OldestLiveId() const;

  const std::unique_ptr<const Policy> policy_;
  const Clock clock_;
  mutable std::mutex mu_;
  // Guarded by mu_.
  TokenState state_;
  WorkerTable workers_;
  std::list<WaitingTake> waiting_;  // Longest first.
  TakeTicket next_ticket_ = 0;
};

}  // namespace gba

#endif  // GBA_TF_CC_CORE_TOKEN_SERVER_H_

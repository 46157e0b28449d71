// Issues tokens, counts what becomes of them, and closes global steps.
//
// Lives on parameter server task 0 of a run. Every token is at all times in exactly one state:
//
//   Take -> outstanding -> Commit -> buffered -> (the step closes) -> applied (weight 1)
//                |                                                 \-> decayed (weight 0)
//                \-> GiveUp, or its worker takes again -> lost
//
//   issued == applied + decayed + lost + outstanding + buffered.
//
// A step that is closed stays in the list of unapplied steps until MarkApplied: whoever closes a
// later step, or commits after the closing worker was given up or took another token, is handed it
// again. A worker that dies while it applies an update therefore never blocks the next one.
// Parameter servers apply a step once, however often it is handed out.
//
// Example, with GbaPolicy(gradients_per_update=2, staleness_tolerance=4) and workers a and b:
//   Take(a) -> {id 0, value 0};  Take(b) -> {id 1, value 0};  Commit(1) -> nothing to apply;
//   Take(b) -> {id 2, value 1};  Commit(0) -> apply {step 0, ids {0, 1}, weights {1, 1}, divisor
//   2}.
#ifndef GBA_TF_CC_CORE_TOKEN_SERVER_H_
#define GBA_TF_CC_CORE_TOKEN_SERVER_H_

#include <cstdint>
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
  std::map<int64_t, int64_t> staleness;  // step - value at the close -> number of gradients.
};

struct CommitOutcome {
  // False if the token had been given up or was committed before: the gradient does not count
  // (again).
  bool counted = false;
  // Closed steps the caller has to apply on every parameter server, in this order, and then to mark
  // as applied: all that are unapplied, or none. Empty for most commits.
  std::vector<ClosedStep> to_apply;
  // Gradients with a smaller id that are in no unapplied step will never be used: their memory can
  // be freed.
  TokenId oldest_live_id = 0;
};

// Thread-safe. No method blocks on anything but a short mutex.
class TokenServer {
 public:
  explicit TokenServer(std::unique_ptr<const Policy> policy);
  TokenServer(const TokenServer&) = delete;
  TokenServer& operator=(const TokenServer&) = delete;

  // Issues a token with value = global_step + floor((buffered + outstanding) / M), which is
  // floor((committed + outstanding) / M) as long as no partial buffer was applied. A worker
  // computes one gradient at a time: a token that `worker.task` still holds, in whatever
  // incarnation, is given up first, and the steps that it had to apply are made available to the
  // next commit.
  Token Take(WorkerId worker);

  // Counts the gradient of `id`; the M-th one closes the global step. Never waits. The closing
  // commit is handed every unapplied step; another one only if the worker that closed one of them
  // was given up or took another token, or the state was restored, before it was marked as applied.
  // Returns NotFound if `id` was never issued.
  Status Commit(TokenId id, CommitOutcome* outcome);

  // Gives up the token that the worker task holds and makes the steps that it had to apply
  // available to the next commit. Called when the worker is known to be dead; harmless when it is
  // not: it will be told at its commit. Returns the ids that are now lost.
  std::vector<TokenId> GiveUp(int64_t worker_task);

  // `step` and all steps before it have been applied on every parameter server.
  // Returns FailedPrecondition if `step` is not closed yet.
  Status MarkApplied(GlobalStep step);

  // The end of training: closes the partial buffer, if there is one, with divisor = its number of
  // gradients, and hands out every unapplied step. `counted` is false.
  CommitOutcome Flush();

  TokenStats stats() const;

  // The whole state as bytes, with a format version and a checksum. Outstanding tokens are saved as
  // lost: the workers that hold them do not survive a restore.
  std::string Serialize() const;
  // Replaces the state; the next commit is handed the unapplied steps. On error nothing is changed
  // and InvalidArgument says what is wrong with `bytes` (truncated, checksum, version, another M).
  Status Restore(const std::string& bytes);

 private:
  // All of these require mu_.
  void LoseTokenOf(int64_t worker_task, std::vector<TokenId>* lost);
  void OrphanStepsOf(int64_t worker_task);
  // Closes a global step with every buffered gradient.
  void CloseStep(int64_t divisor, std::optional<int64_t> closing_task);
  std::vector<ClosedStep> UnappliedSteps() const;
  TokenId OldestLiveId() const;

  const std::unique_ptr<const Policy> policy_;
  mutable std::mutex mu_;
  TokenState state_;  // Guarded by mu_.
};

}  // namespace gba

#endif  // GBA_TF_CC_CORE_TOKEN_SERVER_H_

#include "gba_tf/cc/core/token_server.h"

#include <algorithm>
#include <utility>

namespace gba {

TokenServer::TokenServer(std::unique_ptr<const Policy> policy) : policy_(std::move(policy)) {}

Token TokenServer::Take(WorkerId worker) {
  std::lock_guard<std::mutex> lock(mu_);
  std::vector<TokenId> lost;
  LoseTokenOf(worker.task, &lost);
  // Whoever takes another token is not applying an update any more.
  OrphanStepsOf(worker.task);
  const int64_t in_flight =
      static_cast<int64_t>(state_.buffered.size() + state_.outstanding.size());
  const Token token{state_.next_id, state_.global_step + in_flight / policy_->capacity()};
  ++state_.next_id;
  state_.outstanding[token.id] = {token.value, worker.task};
  state_.held[worker.task] = token.id;
  return token;
}

Status TokenServer::Commit(TokenId id, CommitOutcome* outcome) {
  std::lock_guard<std::mutex> lock(mu_);
  if (id < 0 || id >= state_.next_id) {
    return Status::NotFound("Expected the id of a token that was issued, in [0, " +
                            std::to_string(state_.next_id) + "), found " + std::to_string(id) +
                            ". Commit only tokens that were taken in this run.");
  }
  *outcome = CommitOutcome();
  bool closed = false;
  // An id that was issued and is not outstanding was committed or given up before.
  const auto token = state_.outstanding.find(id);
  if (token != state_.outstanding.end()) {
    const int64_t worker_task = token->second.worker_task;
    outcome->counted = true;
    state_.buffered[id] = token->second.value;
    state_.outstanding.erase(token);
    state_.held.erase(worker_task);
    if (static_cast<int64_t>(state_.buffered.size()) >= policy_->capacity()) {
      CloseStep(policy_->capacity(), worker_task);
      closed = true;
    }
  }
  bool orphaned = false;
  for (const UnappliedStep& step : state_.unapplied) orphaned |= step.orphaned;
  if (closed || orphaned) outcome->to_apply = UnappliedSteps();
  outcome->oldest_live_id = OldestLiveId();
  return Status();
}

std::vector<TokenId> TokenServer::GiveUp(int64_t worker_task) {
  std::lock_guard<std::mutex> lock(mu_);
  std::vector<TokenId> lost;
  LoseTokenOf(worker_task, &lost);
  OrphanStepsOf(worker_task);
  return lost;
}

Status TokenServer::MarkApplied(GlobalStep step) {
  std::lock_guard<std::mutex> lock(mu_);
  if (step < 0 || step >= state_.global_step) {
    return Status::FailedPrecondition(
        "Expected a closed global step, in [0, " + std::to_string(state_.global_step) +
        "), found " + std::to_string(step) + ". Mark only steps that a commit handed out.");
  }
  while (!state_.unapplied.empty() && state_.unapplied.front().closed.step <= step) {
    state_.unapplied.pop_front();
  }
  return Status();
}

CommitOutcome TokenServer::Flush() {
  std::lock_guard<std::mutex> lock(mu_);
  if (!state_.buffered.empty()) {
    CloseStep(static_cast<int64_t>(state_.buffered.size()), std::nullopt);
  }
  CommitOutcome outcome;
  outcome.to_apply = UnappliedSteps();
  outcome.oldest_live_id = OldestLiveId();
  return outcome;
}

TokenStats TokenServer::stats() const {
  std::lock_guard<std::mutex> lock(mu_);
  TokenStats stats;
  stats.issued = state_.next_id;
  stats.applied = state_.applied;
  stats.decayed = state_.decayed;
  stats.lost = state_.lost;
  stats.outstanding = static_cast<int64_t>(state_.outstanding.size());
  stats.buffered = static_cast<int64_t>(state_.buffered.size());
  stats.global_step = state_.global_step;
  stats.unapplied_steps = static_cast<int64_t>(state_.unapplied.size());
  stats.staleness = state_.staleness;
  return stats;
}

std::string TokenServer::Serialize() const {
  std::lock_guard<std::mutex> lock(mu_);
  return EncodeTokenState(state_, policy_->capacity());
}

Status TokenServer::Restore(const std::string& bytes) {
  TokenState restored;
  Status status = DecodeTokenState(bytes, policy_->capacity(), &restored);
  if (!status.ok()) return status;
  std::lock_guard<std::mutex> lock(mu_);
  std::swap(state_, restored);
  return Status();
}

void TokenServer::LoseTokenOf(int64_t worker_task, std::vector<TokenId>* lost) {
  const auto held = state_.held.find(worker_task);
  if (held == state_.held.end()) return;
  lost->push_back(held->second);
  state_.outstanding.erase(held->second);
  state_.held.erase(held);
  ++state_.lost;
}

void TokenServer::OrphanStepsOf(int64_t worker_task) {
  for (UnappliedStep& step : state_.unapplied) {
    if (step.closing_task == worker_task) step.orphaned = true;
  }
}

void TokenServer::CloseStep(int64_t divisor, std::optional<int64_t> closing_task) {
  UnappliedStep unapplied;
  unapplied.closing_task = closing_task;
  ClosedStep& closed = unapplied.closed;
  closed.step = state_.global_step;
  closed.divisor = divisor;
  for (const auto& [id, value] : state_.buffered) {
    const float weight = policy_->Weight(closed.step, value);
    closed.ids.push_back(id);
    closed.weights.push_back(weight);
    ++(weight != 0.0f ? state_.applied : state_.decayed);
    ++state_.staleness[closed.step - value];
  }
  state_.buffered.clear();
  ++state_.global_step;
  state_.unapplied.push_back(std::move(unapplied));
}

std::vector<ClosedStep> TokenServer::UnappliedSteps() const {
  std::vector<ClosedStep> steps;
  for (const UnappliedStep& unapplied : state_.unapplied) steps.push_back(unapplied.closed);
  return steps;
}

TokenId TokenServer::OldestLiveId() const {
  TokenId oldest = state_.next_id;
  if (!state_.outstanding.empty()) oldest = std::min(oldest, state_.outstanding.begin()->first);
  if (!state_.buffered.empty()) oldest = std::min(oldest, state_.buffered.begin()->first);
  return oldest;
}

}  // namespace gba

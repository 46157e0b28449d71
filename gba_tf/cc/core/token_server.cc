#include "gba_tf/cc/core/token_server.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

namespace gba {

TokenServer::TokenServer(std::unique_ptr<const Policy> policy, Clock clock)
    : policy_(std::move(policy)), clock_(std::move(clock)) {}

TokenServer::~TokenServer() {
  // Nobody else uses this object any more.
  EndedTakes ended;
  for (WaitingTake& take : waiting_) {
    ended.push_back({std::move(take.callback),
                     Status::Cancelled("The token server that this worker waits for is gone: a "
                                       "newer run uses the parameter server, or it ends."),
                     {}});
  }
  CallBack(ended);
}

double TokenServer::SteadySeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void TokenServer::Take(WorkerId worker, TakeCallback callback, const MayWait& may_wait) {
  const bool waits = policy_->waits();
  Token token{};
  EndedTakes ended;
  {
    std::lock_guard<std::mutex> lock(mu_);
    std::vector<TokenId> lost;
    LoseTokenOf(worker.task, &lost);
    // Whoever takes another token is not applying an update any more.
    OrphanStepsOf(worker.task);
    CancelWaitOf(worker.task, "its worker takes another token", &ended);
    workers_.Arrive(worker);
    if (waits) {
      const TakeTicket ticket = next_ticket_++;
      waiting_.push_back({ticket, worker, std::move(callback)});
      AdmitWaiting(&ended);
      // If it has to wait it is the last one.
      const bool kept = !waiting_.empty() && waiting_.back().ticket == ticket;
      if (kept && may_wait && !may_wait(ticket)) {
        CancelWaitOf(worker.task, "the step of its worker was cancelled", &ended);
      }
    } else {
      token = Issue(worker.task);
    }
  }
  if (!waits) callback(Status(), token);
  CallBack(ended);
}

void TokenServer::CancelTake(TakeTicket ticket) {
  EndedTakes ended;
  {
    std::lock_guard<std::mutex> lock(mu_);
    for (const WaitingTake& take : waiting_) {
      if (take.ticket != ticket) continue;
      CancelWaitOf(take.worker.task, "the step of its worker was cancelled", &ended);
      break;
    }
  }
  CallBack(ended);
}

void TokenServer::Join(int64_t worker_task) {
  // Nobody who waits is admitted because of one worker more.
  std::lock_guard<std::mutex> lock(mu_);
  workers_.Join(worker_task);
}

void TokenServer::Leave(int64_t worker_task) {
  EndedTakes ended;
  {
    std::lock_guard<std::mutex> lock(mu_);
    workers_.Leave(worker_task);
    AdmitWaiting(&ended);
  }
  CallBack(ended);
}

Status TokenServer::Commit(TokenId id, CommitOutcome* outcome) {
  EndedTakes ended;
  {
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
      const OutstandingToken taken = token->second;
      state_.outstanding.erase(token);
      state_.held.erase(taken.worker_task);
      workers_.Commit(taken.worker_task, clock_() - taken.taken_at);
      outcome->counted = policy_->Accepts(state_.global_step, taken.value);
      if (outcome->counted) {
        state_.buffered[id] = taken.value;
        workers_.SetBuffered(taken.worker_task, state_.global_step);
        if (static_cast<int64_t>(state_.buffered.size()) >= policy_->capacity()) {
          CloseStep(policy_->capacity(), taken.worker_task);
          closed = true;
        }
      } else {
        ++state_.decayed;
        ++state_.staleness[state_.global_step - taken.value];
      }
    }
    bool orphaned = false;
    for (const UnappliedStep& step : state_.unapplied) orphaned |= step.orphaned;
    if (closed || orphaned) outcome->to_apply = UnappliedSteps();
    outcome->oldest_live_id = OldestLiveId();
    AdmitWaiting(&ended);
  }
  CallBack(ended);
  return Status();
}

std::vector<TokenId> TokenServer::GiveUp(int64_t worker_task) {
  std::vector<TokenId> lost;
  EndedTakes ended;
  {
    std::lock_guard<std::mutex> lock(mu_);
    LoseTokenOf(worker_task, &lost);
    OrphanStepsOf(worker_task);
    CancelWaitOf(worker_task, "its worker was given up as dead", &ended);
    workers_.GiveUp(worker_task);
    AdmitWaiting(&ended);
  }
  CallBack(ended);
  return lost;
}

Status TokenServer::MarkApplied(GlobalStep step) {
  EndedTakes ended;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (step < 0 || step >= state_.global_step) {
      return Status::FailedPrecondition(
          "Expected a closed global step, in [0, " + std::to_string(state_.global_step) +
          "), found " + std::to_string(step) + ". Mark only steps that a commit handed out.");
    }
    while (!state_.unapplied.empty() && state_.unapplied.front().closed.step <= step) {
      state_.unapplied.pop_front();
    }
    AdmitWaiting(&ended);
  }
  CallBack(ended);
  return Status();
}

CommitOutcome TokenServer::Flush(bool close_partial) {
  CommitOutcome outcome;
  EndedTakes ended;
  {
    std::lock_guard<std::mutex> lock(mu_);
    if (close_partial && !state_.buffered.empty()) {
      CloseStep(static_cast<int64_t>(state_.buffered.size()), std::nullopt);
    }
    outcome.to_apply = UnappliedSteps();
    outcome.oldest_live_id = OldestLiveId();
    AdmitWaiting(&ended);
  }
  CallBack(ended);
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
  stats.waiting = static_cast<int64_t>(waiting_.size());
  stats.staleness = state_.staleness;
  return stats;
}

std::vector<WorkerSeconds> TokenServer::worker_seconds() const {
  std::lock_guard<std::mutex> lock(mu_);
  return workers_.seconds();
}

std::string TokenServer::Serialize() const {
  std::lock_guard<std::mutex> lock(mu_);
  return EncodeTokenState(state_, *policy_);
}

Status TokenServer::Restore(const std::string& bytes) {
  TokenState restored;
  Status status = DecodeTokenState(bytes, *policy_, &restored);
  if (!status.ok()) return status;
  EndedTakes ended;
  {
    std::lock_guard<std::mutex> lock(mu_);
    std::swap(state_, restored);
    workers_.ForgetBuffered();
    AdmitWaiting(&ended);
  }
  CallBack(ended);
  return Status();
}

void TokenServer::CallBack(const EndedTakes& ended) {
  for (const EndedTake& take : ended) take.callback(take.status, take.token);
}

Token TokenServer::Issue(int64_t worker_task) {
  const int64_t in_flight =
      static_cast<int64_t>(state_.buffered.size() + state_.outstanding.size());
  const Token token{state_.next_id, policy_->TokenValue(state_.global_step, in_flight)};
  ++state_.next_id;
  state_.outstanding[token.id] = {token.value, worker_task, clock_()};
  state_.held[worker_task] = token.id;
  return token;
}

void TokenServer::AdmitWaiting(EndedTakes* ended) {
  const auto admit = [&](std::list<WaitingTake>::iterator take) {
    ended->push_back({std::move(take->callback), Status(), Issue(take->worker.task)});
    return waiting_.erase(take);
  };
  for (auto take = waiting_.begin(); take != waiting_.end();) {
    WorkerStanding worker = workers_.StandingOf(take->worker.task, state_.global_step);
    worker.update_is_pending = !state_.unapplied.empty();
    take = policy_->Admits(worker) ? admit(take) : std::next(take);
  }
  if (!waiting_.empty() && EveryBusyWorkerWaits()) admit(waiting_.begin());
}

bool TokenServer::EveryBusyWorkerWaits() const {
  int64_t num_waiting = 0;
  for (const WaitingTake& take : waiting_) num_waiting += workers_.IsBusy(take.worker.task);
  return num_waiting == workers_.num_busy();
}

void TokenServer::CancelWaitOf(int64_t worker_task, const char* why, EndedTakes* ended) {
  for (auto take = waiting_.begin(); take != waiting_.end(); ++take) {
    if (take->worker.task != worker_task) continue;
    ended->push_back({std::move(take->callback),
                      Status::Cancelled("Worker " + std::to_string(worker_task) +
                                        " does not wait for a token any more: " + why + "."),
                      {}});
    waiting_.erase(take);
    return;
  }
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

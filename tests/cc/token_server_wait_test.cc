// Waiting for a token: what makes a worker wait, and everything that ends its wait.
#include <algorithm>

#include "gba_tf/cc/core/token_server.h"
#include "tests/cc/take.h"
#include "tests/cc/testing.h"

namespace {

using gba::CommitOutcome;
using gba::HopBsPolicy;
using gba::HopBwPolicy;
using gba::Status;
using gba::StatusCode;
using gba::Token;
using gba::TokenServer;
using gba::TokenStats;
using gba_testing::Take;

using Ints = std::vector<int64_t>;
using Histogram = std::map<int64_t, int64_t>;

// What became of a Take that may wait.
struct Call {
  int num_callbacks = 0;
  Status status;
  Token token{-1, -1};
};

std::shared_ptr<Call> TakeOrWait(TokenServer* server, gba::WorkerId worker,
                                 const TokenServer::MayWait& may_wait = nullptr) {
  auto call = std::make_shared<Call>();
  server->Take(
      worker,
      [call](const Status& status, const Token& token) {
        ++call->num_callbacks;
        call->status = status;
        call->token = token;
      },
      may_wait);
  return call;
}

// Exactly one callback, with a token.
bool Got(const std::shared_ptr<Call>& call) {
  return call->num_callbacks == 1 && call->status.ok() && call->token.id >= 0;
}
bool Waits(const std::shared_ptr<Call>& call) { return call->num_callbacks == 0; }

#define EXPECT_CANCELLED(call, why)                            \
  do {                                                         \
    EXPECT_EQ((call)->num_callbacks, 1);                       \
    EXPECT_ERROR((call)->status, StatusCode::kCancelled, why); \
  } while (false)

CommitOutcome Commit(TokenServer* server, gba::TokenId id) {
  CommitOutcome outcome;
  EXPECT_OK(server->Commit(id, &outcome));
  return outcome;
}

// As a worker does, which applies what it closes.
CommitOutcome CommitAndApply(TokenServer* server, gba::TokenId id) {
  const CommitOutcome outcome = Commit(server, id);
  for (const gba::ClosedStep& closed : outcome.to_apply) {
    EXPECT_OK(server->MarkApplied(closed.step));
  }
  return outcome;
}

void TakeAndCommit(TokenServer* server, int64_t task, int times = 1) {
  for (int i = 0; i < times; ++i) CommitAndApply(server, Take(server, {task, 0}).id);
}

Ints Counts(const TokenStats& s) {
  return {s.issued, s.applied, s.decayed, s.lost, s.outstanding, s.buffered};
}

std::unique_ptr<TokenServer> HopBs(int64_t bound) {
  return std::make_unique<TokenServer>(std::make_unique<HopBsPolicy>(bound));
}
std::unique_ptr<TokenServer> HopBw(int64_t m) {
  return std::make_unique<TokenServer>(std::make_unique<HopBwPolicy>(m));
}

// ---- hop_bs ----

TEST(FastWorkerWaitsForTheSlowestUntilThatCommits) {
  const auto server = HopBs(2);
  server->Join(1);
  TakeAndCommit(server.get(), 0, 2);
  const auto call = TakeOrWait(server.get(), {0, 0});
  EXPECT_EQ(Waits(call), true);
  EXPECT_EQ(server->stats().waiting, 1);
  EXPECT_EQ(Counts(server->stats()), (Ints{2, 2, 0, 0, 0, 0}));  // It holds no token.
  const Token slow = Take(server.get(), {1, 0});
  EXPECT_EQ(Waits(call), true);
  Commit(server.get(), slow.id);
  ASSERT_EQ(Got(call), true);
  EXPECT_EQ(call->token.id, 3);
  EXPECT_EQ(call->token.value, 3);
  EXPECT_EQ(server->stats().waiting, 0);
  Commit(server.get(), call->token.id);  // Its third, to one of the slowest: 2 ahead.
  EXPECT_EQ(Waits(TakeOrWait(server.get(), {0, 0})), true);
}

TEST(EveryGradientUnderBoundedStalenessIsAnUpdateOfWeightOne) {
  const auto server = HopBs(4);
  const Token slow = Take(server.get(), {0, 0});
  for (int i = 0; i < 4; ++i) Commit(server.get(), Take(server.get(), {1, 0}).id);
  const CommitOutcome outcome = Commit(server.get(), slow.id);
  EXPECT_EQ(outcome.counted, true);
  ASSERT_EQ(outcome.to_apply.size(), size_t{5});  // Nobody has marked the four as applied.
  EXPECT_EQ(outcome.to_apply[4].ids, Ints{0});
  EXPECT_EQ(outcome.to_apply[4].weights, std::vector<float>{1});
  EXPECT_EQ(outcome.to_apply[4].divisor, 1);
  EXPECT_EQ(Counts(server->stats()), (Ints{5, 5, 0, 0, 0, 0}));
  // The four were taken with one in flight, so they have values one above their steps.
  EXPECT_EQ(server->stats().staleness, (Histogram{{-1, 4}, {4, 1}}));
}

TEST(SlowestWorkerNeverWaits) {
  const auto server = HopBs(1);
  for (int round = 0; round < 10; ++round) {
    const Token first = Take(server.get(), {0, 0});
    Commit(server.get(), Take(server.get(), {1, 0}).id);
    EXPECT_EQ(Waits(TakeOrWait(server.get(), {1, 0})), true);
    Commit(server.get(), first.id);
  }
}

TEST(DeathOfTheSlowestWorkerEndsTheWait) {
  const auto server = HopBs(1);
  const Token held = Take(server.get(), {1, 0});
  TakeAndCommit(server.get(), 0);
  const auto call = TakeOrWait(server.get(), {0, 0});
  EXPECT_EQ(Waits(call), true);
  EXPECT_EQ(server->GiveUp(1), Ints{held.id});
  EXPECT_EQ(Got(call), true);
  EXPECT_EQ(Counts(server->stats()), (Ints{3, 1, 0, 1, 1, 0}));
}

TEST(WorkerWithoutWorkEndsTheWait) {
  const auto server = HopBs(1);
  server->Join(1);
  TakeAndCommit(server.get(), 0);
  const auto call = TakeOrWait(server.get(), {0, 0});
  EXPECT_EQ(Waits(call), true);
  server->Leave(1);
  EXPECT_EQ(Got(call), true);
}

TEST(WorkerThatJoinsLateDoesNotStopTheOthersByItsOldCount) {
  const auto server = HopBs(2);
  TakeAndCommit(server.get(), 1);
  server->Leave(1);
  TakeAndCommit(server.get(), 0, 100);
  server->Join(1);
  TakeAndCommit(server.get(), 0, 2);
  EXPECT_EQ(Waits(TakeOrWait(server.get(), {0, 0})), true);
}

TEST(RequestOfADeadProcessThatArrivesLateHoldsNobodyUp) {
  const auto server = HopBs(1);
  Take(server.get(), {1, 7});
  server->GiveUp(1);
  Take(server.get(), {1, 7});
  TakeAndCommit(server.get(), 0, 5);
  // Its next process takes part again.
  Take(server.get(), {1, 8});
  TakeAndCommit(server.get(), 0);
  EXPECT_EQ(Waits(TakeOrWait(server.get(), {0, 0})), true);
}

// ---- hop_bw ----

TEST(StepClosesWithTheFirstGradientsAndALateOneIsDropped) {
  const auto server = HopBw(2);
  for (int64_t task : {0, 1, 2}) EXPECT_EQ(Take(server.get(), {task, 0}).value, 0);
  EXPECT_EQ(Commit(server.get(), 0).counted, true);
  const auto call = TakeOrWait(server.get(), {0, 0});
  EXPECT_EQ(Waits(call), true);
  const CommitOutcome closing = Commit(server.get(), 1);
  ASSERT_EQ(closing.to_apply.size(), size_t{1});
  EXPECT_EQ(closing.to_apply[0].ids, (Ints{0, 1}));
  EXPECT_EQ(closing.to_apply[0].divisor, 2);
  // Nobody reads parameters that the update has not reached.
  EXPECT_EQ(Waits(call), true);
  EXPECT_OK(server->MarkApplied(0));
  ASSERT_EQ(Got(call), true);
  EXPECT_EQ(call->token.id, 3);
  EXPECT_EQ(call->token.value, 1);

  const CommitOutcome late = Commit(server.get(), 2);
  EXPECT_EQ(late.counted, false);
  EXPECT_EQ(late.to_apply.empty(), true);
  EXPECT_EQ(late.oldest_live_id, 3);  // So the memory of gradient 2 is freed.
  EXPECT_EQ(Counts(server->stats()), (Ints{4, 2, 1, 0, 1, 0}));
  EXPECT_EQ(server->stats().staleness, (Histogram{{0, 2}, {1, 1}}));
  EXPECT_EQ(Take(server.get(), {2, 0}).value, 1);  // A worker that was late does not wait.
}

TEST(WorkerWhoseGradientIsInTheOpenStepIsLetThroughWhenNobodyElseCanCloseIt) {
  const auto server = HopBw(3);
  for (int64_t task : {0, 1, 2}) Take(server.get(), {task, 0});
  Commit(server.get(), 0);
  Commit(server.get(), 1);
  const auto longest = TakeOrWait(server.get(), {0, 0});
  const auto other = TakeOrWait(server.get(), {1, 0});
  EXPECT_EQ(server->stats().waiting, 2);
  server->GiveUp(2);
  ASSERT_EQ(Got(longest), true);
  EXPECT_EQ(Waits(other), true);
  EXPECT_EQ(longest->token.value, 0);
  const CommitOutcome closing = CommitAndApply(server.get(), longest->token.id);
  ASSERT_EQ(closing.to_apply.size(), size_t{1});
  EXPECT_EQ(closing.to_apply[0].ids, (Ints{0, 1, 3}));
  EXPECT_EQ(Got(other), true);
  EXPECT_EQ(other->token.value, 1);
}

TEST(AnUpdateWhoseWorkerDiedIsAppliedByTheOneThatIsLetThrough) {
  const auto server = HopBw(2);
  for (int64_t task : {0, 1}) Take(server.get(), {task, 0});
  Commit(server.get(), 0);
  EXPECT_EQ(Commit(server.get(), 1).to_apply.size(), size_t{1});
  const auto call = TakeOrWait(server.get(), {0, 0});
  EXPECT_EQ(Waits(call), true);
  server->GiveUp(1);
  ASSERT_EQ(Got(call), true);
  const CommitOutcome outcome = Commit(server.get(), call->token.id);
  ASSERT_EQ(outcome.to_apply.size(), size_t{1});
  EXPECT_EQ(outcome.to_apply[0].step, 0);
}

TEST(TheLastWorkerWithWorkFillsTheStepAlone) {
  const auto server = HopBw(3);
  server->Join(1);
  TakeAndCommit(server.get(), 0);
  const auto call = TakeOrWait(server.get(), {0, 0});
  EXPECT_EQ(Waits(call), true);
  server->Leave(1);
  ASSERT_EQ(Got(call), true);
  Commit(server.get(), call->token.id);
  const CommitOutcome closing = Commit(server.get(), Take(server.get(), {0, 0}).id);
  ASSERT_EQ(closing.to_apply.size(), size_t{1});
  EXPECT_EQ(closing.to_apply[0].ids, (Ints{0, 1, 2}));
}

TEST(ClosingThePartialStepEndsTheWait) {
  const auto server = HopBw(2);
  server->Join(1);
  TakeAndCommit(server.get(), 0);
  const auto call = TakeOrWait(server.get(), {0, 0});
  EXPECT_EQ(server->Flush(/*close_partial=*/false).to_apply.empty(), true);
  EXPECT_EQ(Waits(call), true);
  EXPECT_EQ(server->Flush(/*close_partial=*/true).to_apply.size(), size_t{1});
  EXPECT_OK(server->MarkApplied(0));
  ASSERT_EQ(Got(call), true);
  EXPECT_EQ(call->token.value, 1);
}

TEST(RestoringAnotherStateEndsTheWaitForTheStepThatIsGone) {
  const auto saved = HopBw(2);
  TakeAndCommit(saved.get(), 5);
  const std::string bytes = saved->Serialize();
  const auto server = HopBw(2);
  server->Join(1);
  TakeAndCommit(server.get(), 0);
  const auto call = TakeOrWait(server.get(), {0, 0});
  EXPECT_OK(server->Restore(bytes));
  ASSERT_EQ(Got(call), true);
  EXPECT_EQ(call->token.id, 1);
  EXPECT_EQ(Commit(server.get(), 1).to_apply[0].ids, (Ints{0, 1}));
}

// ---- The end of a wait without a token ----

TEST(AnotherTakeOfTheTaskCancelsTheOlderOne) {
  const auto server = HopBw(2);
  server->Join(1);
  TakeAndCommit(server.get(), 0);
  const auto older = TakeOrWait(server.get(), {0, 0});
  const auto newer = TakeOrWait(server.get(), {0, 1});
  EXPECT_CANCELLED(older, "Worker 0 does not wait for a token any more: its worker takes another");
  EXPECT_EQ(Waits(newer), true);
  TakeAndCommit(server.get(), 1);
  EXPECT_EQ(Got(newer), true);
  EXPECT_EQ(older->num_callbacks, 1);
}

TEST(DeathOfTheWaitingWorkerCancelsItsOwnTake) {
  const auto server = HopBw(2);
  server->Join(1);
  TakeAndCommit(server.get(), 0);
  const auto call = TakeOrWait(server.get(), {0, 0});
  EXPECT_EQ(server->GiveUp(0), Ints{});
  EXPECT_CANCELLED(call, "given up as dead");
  EXPECT_EQ(server->stats().waiting, 0);
}

TEST(CancellationEndsTheWaitAndLaterOnesDoNothing) {
  const auto server = HopBw(2);
  server->Join(1);
  TakeAndCommit(server.get(), 0);
  TokenServer::TakeTicket ticket = -1;
  const auto may_wait = [&ticket](TokenServer::TakeTicket given) {
    ticket = given;
    return true;
  };
  const auto cancelled = TakeOrWait(server.get(), {0, 0}, may_wait);
  server->CancelTake(ticket + 1);
  EXPECT_EQ(Waits(cancelled), true);
  server->CancelTake(ticket);
  EXPECT_CANCELLED(cancelled, "the step of its worker was cancelled");
  server->CancelTake(ticket);
  EXPECT_EQ(cancelled->num_callbacks, 1);

  const auto served = TakeOrWait(server.get(), {0, 0}, may_wait);
  TakeAndCommit(server.get(), 1);
  EXPECT_EQ(Got(served), true);
  server->CancelTake(ticket);
  EXPECT_EQ(served->num_callbacks, 1);
}

TEST(TakeOfACancelledStepDoesNotStartToWait) {
  const auto server = HopBw(2);
  server->Join(1);
  int asked = 0;
  const auto refuse = [&asked](TokenServer::TakeTicket) {
    ++asked;
    return false;
  };
  const auto at_once = TakeOrWait(server.get(), {0, 0}, refuse);
  EXPECT_EQ(Got(at_once), true);
  EXPECT_EQ(asked, 0);
  Commit(server.get(), at_once->token.id);
  const auto refused = TakeOrWait(server.get(), {0, 0}, refuse);
  EXPECT_CANCELLED(refused, "was cancelled");
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(server->stats().waiting, 0);
}

TEST(TheEndOfTheServerEndsEveryWait) {
  auto server = HopBw(3);
  server->Join(2);
  std::vector<std::shared_ptr<Call>> calls;
  for (int64_t task : {0, 1}) {
    TakeAndCommit(server.get(), task);
    calls.push_back(TakeOrWait(server.get(), {task, 0}));
  }
  server.reset();
  for (const auto& call : calls) EXPECT_CANCELLED(call, "is gone: a newer run");
}

TEST(CallbacksMayCallTheServer) {
  const auto server = HopBw(2);
  server->Join(1);
  TakeAndCommit(server.get(), 0);
  int64_t waiting = -1;
  server->Take({0, 0}, [&](const Status&, const Token& token) {
    waiting = server->stats().waiting;
    Commit(server.get(), token.id);
  });
  TakeAndCommit(server.get(), 1);
  EXPECT_EQ(waiting, 0);
  EXPECT_EQ(Counts(server->stats()), (Ints{3, 2, 0, 0, 0, 1}));
}

// ---- Seconds of the workers ----

TEST(SecondsOfAGradientBeginWithItsTokenAndEndWithItsCommit) {
  double now = 100;
  TokenServer server(std::make_unique<HopBwPolicy>(2), [&now] { return now; });
  const Token a = Take(&server, {0, 0});
  now = 101;
  const Token b = Take(&server, {1, 0});
  const Token c = Take(&server, {2, 0});
  now = 103;
  Commit(&server, a.id);  // 3 seconds.
  const auto waits = TakeOrWait(&server, {0, 0});
  now = 108;
  CommitAndApply(&server, b.id);  // 7 seconds; ends the wait of worker 0, which is not counted.
  now = 109;
  Commit(&server, waits->token.id);  // 1 second.
  now = 121;
  EXPECT_EQ(Commit(&server, c.id).counted, false);  // Late, but it took 20 seconds all the same.
  Commit(&server, c.id);
  server.GiveUp(1);
  const std::vector<gba::WorkerSeconds> seconds = server.worker_seconds();
  ASSERT_EQ(seconds.size(), size_t{3});
  for (size_t task = 0; task < 3; ++task) {
    EXPECT_EQ(seconds[task].task, static_cast<int64_t>(task));
    EXPECT_EQ(seconds[task].gradients, (Ints{2, 1, 1})[task]);
    EXPECT_EQ(seconds[task].seconds, (std::vector<double>{4, 7, 20})[task]);
  }
}

}  // namespace

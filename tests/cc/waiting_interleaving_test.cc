// The policies that wait, under random sequences and interleavings of workers that take, commit,
// die, leave, join and are cancelled: nobody is ever further ahead than allowed, and nobody waits
// for ever.
#include <algorithm>
#include <future>
#include <random>
#include <set>
#include <thread>

#include "gba_tf/cc/core/token_server.h"
#include "tests/cc/testing.h"

namespace {

using gba::ClosedStep;
using gba::CommitOutcome;
using gba::HopBsPolicy;
using gba::HopBwPolicy;
using gba::Policy;
using gba::Status;
using gba::StatusCode;
using gba::Token;
using gba::TokenServer;
using gba::TokenStats;

void CheckEquation(const TokenStats& s) {
  EXPECT_EQ(s.applied + s.decayed + s.lost + s.outstanding + s.buffered, s.issued);
  int64_t counted = 0;
  for (const auto& [staleness, count] : s.staleness) counted += count;
  EXPECT_EQ(counted, s.applied + s.decayed);
}

// One thread plays all workers.
struct Player {
  enum State { kIdle, kBetween, kWaiting, kComputing };
  State state = kIdle;
  bool busy = false;
  int64_t committed = 0;  // Raised where it joins.
  Token token{-1, -1};
  TokenServer::TakeTicket ticket = -1;
  int expected_callbacks = 0;
  int callbacks = 0;
};

class Game {
 public:
  Game(std::unique_ptr<const Policy> policy, int64_t bound, uint64_t seed)
      : bound_(bound), random_(seed), server_(std::move(policy)) {}

  void Play(int num_moves) {
    for (int i = 0; i < num_moves; ++i) {
      Move();
      Check();
    }
    // The end: everybody finishes what is begun, and leaves. Then nobody waits.
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t task = 0; task < kWorkers; ++task) {
        if (players_[task].state == Player::kComputing) {
          Commit(task);
          moved = true;
        } else if (players_[task].state == Player::kBetween) {
          Leave(task);
          moved = true;
        }
      }
    }
    Check();
    EXPECT_EQ(server_.stats().waiting, 0);
  }

 private:
  static constexpr size_t kWorkers = 4;

  void Move() {
    const size_t task = random_() % kWorkers;
    Player& player = players_[task];
    switch (random_() % 16) {
      case 0:
        Die(task);
        return;
      case 1:
        if (player.state == Player::kWaiting) {
          ++player.expected_callbacks;
          player.state = Player::kBetween;  // Before its callback, which tells the two apart.
          server_.CancelTake(player.ticket);
        }
        return;
      case 2:
        if (player.state == Player::kBetween) Leave(task);
        return;
      case 3:
        if (player.state == Player::kIdle) {
          server_.Join(static_cast<int64_t>(task));
          Join(task);
          player.state = Player::kBetween;
        }
        return;
      default:
        if (player.state == Player::kComputing) {
          Commit(task);
        } else if (player.state != Player::kWaiting) {
          Take(task);
        }
    }
  }

  void Take(size_t task) {
    Player& player = players_[task];
    Join(task);
    player.state = Player::kWaiting;
    NoteWaiting();
    server_.Take(
        {static_cast<int64_t>(task), ++incarnation_},
        [&player](const Status& status, const Token& token) {
          ++player.callbacks;
          // Cancelled calls have been given another state before.
          EXPECT_EQ(status.ok(), player.state == Player::kWaiting);
          if (!status.ok()) return;
          player.state = Player::kComputing;
          player.token = token;
        },
        [&player](TokenServer::TakeTicket ticket) {
          player.ticket = ticket;
          return true;
        });
    SettleWaiting();
  }

  void Commit(size_t task) {
    Player& player = players_[task];
    const GlobalStepAndToken before{server_.stats().global_step, player.token};
    ++player.committed;
    player.state = Player::kBetween;
    NoteWaiting();
    CommitOutcome outcome;
    EXPECT_OK(server_.Commit(player.token.id, &outcome));
    EXPECT_EQ(outcome.counted, bound_ > 0 || before.token.value == before.step);
    for (const ClosedStep& step : outcome.to_apply) {
      EXPECT_EQ(static_cast<int64_t>(step.ids.size()), server_.policy().capacity());
      for (gba::TokenId id : step.ids) EXPECT_EQ(in_steps_.insert(id).second, true);
      EXPECT_OK(server_.MarkApplied(step.step));
    }
    SettleWaiting();
  }

  void Leave(size_t task) {
    RaiseFloor();
    players_[task].busy = false;
    players_[task].state = Player::kIdle;
    NoteWaiting();
    server_.Leave(static_cast<int64_t>(task));
    SettleWaiting();
  }

  void Die(size_t task) {
    Player& player = players_[task];
    RaiseFloor();
    if (player.state == Player::kWaiting) ++player.expected_callbacks;
    player.state = Player::kIdle;
    player.busy = false;
    NoteWaiting();
    server_.GiveUp(static_cast<int64_t>(task));
    SettleWaiting();
  }

  // Of the calls that wait, those that got a token meanwhile had their one callback.
  void NoteWaiting() {
    waited_.clear();
    for (Player& player : players_) {
      if (player.state == Player::kWaiting) waited_.push_back(&player);
    }
  }
  void SettleWaiting() {
    for (Player* player : waited_) {
      if (player->state == Player::kComputing) ++player->expected_callbacks;
    }
  }

  void RaiseFloor() {
    int64_t least = -1;
    for (const Player& player : players_) {
      if (player.busy && (least < 0 || player.committed < least)) least = player.committed;
    }
    floor_ = std::max(floor_, least);
  }
  void Join(size_t task) {
    Player& player = players_[task];
    if (player.busy) return;
    RaiseFloor();
    player.committed = std::max(player.committed, floor_);
    player.busy = true;
  }

  void Check() {
    const TokenStats stats = server_.stats();
    CheckEquation(stats);
    int64_t waiting = 0, busy = 0, least = -1, most = -1;
    for (const Player& player : players_) {
      EXPECT_EQ(player.callbacks, player.expected_callbacks);
      waiting += player.state == Player::kWaiting;
      if (!player.busy) continue;
      ++busy;
      if (least < 0 || player.committed < least) least = player.committed;
      most = std::max(most, player.committed);
    }
    EXPECT_EQ(stats.waiting, waiting);
    EXPECT_EQ(waiting == 0 || waiting < busy, true);  // Somebody can end the wait.
    if (bound_ > 0) EXPECT_EQ(most - least <= bound_, true);
  }

  struct GlobalStepAndToken {
    int64_t step;
    Token token;
  };

  const int64_t bound_;  // Of hop_bs; 0: another policy.
  std::mt19937_64 random_;
  TokenServer server_;
  Player players_[kWorkers];
  std::vector<Player*> waited_;
  std::set<gba::TokenId> in_steps_;
  int64_t incarnation_ = 0;
  int64_t floor_ = 0;
};

TEST(NobodyIsFurtherAheadThanTheBoundInRandomSequences) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    const int before = gba_testing::FailedExpectations();
    const auto bound = static_cast<int64_t>(1 + seed % 4);
    Game(std::make_unique<HopBsPolicy>(bound), bound, seed).Play(300);
    if (gba_testing::FailedExpectations() != before) {
      std::cerr << "  with seed " << seed << std::endl;
      return;
    }
  }
}

TEST(StepsOfBackupWorkersHaveTheirOwnGradientsInRandomSequences) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    const int before = gba_testing::FailedExpectations();
    const auto m = static_cast<int64_t>(1 + seed % 4);
    Game(std::make_unique<HopBwPolicy>(m), 0, seed).Play(300);
    if (gba_testing::FailedExpectations() != before) {
      std::cerr << "  with seed " << seed << std::endl;
      return;
    }
  }
}

// A worker's thread blocks until it has its token, as a step does.
Status TakeAndBlock(TokenServer* server, gba::WorkerId worker, Token* token,
                    std::atomic<int64_t>* ticket = nullptr) {
  std::promise<std::pair<Status, Token>> promise;
  server->Take(
      worker,
      [&promise](const Status& status, const Token& taken) { promise.set_value({status, taken}); },
      [ticket](TokenServer::TakeTicket given) {
        if (ticket != nullptr) *ticket = given;
        return true;
      });
  const auto [status, taken] = promise.get_future().get();
  *token = taken;
  return status;
}

TEST(ThreadsAreNeverFurtherAheadThanTheBound) {
  constexpr int64_t kBound = 2;
  constexpr int kThreads = 3, kSteps = 400;
  TokenServer server(std::make_unique<HopBsPolicy>(kBound));
  // Commits that have begun and that have ended: the truth is between the two.
  std::atomic<int64_t> begun[kThreads] = {}, ended[kThreads] = {};
  for (int task = 0; task < kThreads; ++task) server.Join(task);
  std::atomic<bool> done{false};
  std::thread checker([&] {
    while (!done) {
      for (int fast = 0; fast < kThreads; ++fast) {
        for (int slow = 0; slow < kThreads; ++slow) {
          const int64_t at_least = ended[fast];
          const int64_t at_most = begun[slow];
          EXPECT_EQ(at_least - at_most <= kBound, true);
        }
      }
      CheckEquation(server.stats());
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> workers;
  for (int task = 0; task < kThreads; ++task) {
    workers.emplace_back([&, task] {
      std::mt19937_64 random(static_cast<uint64_t>(task));
      for (int i = 0; i < kSteps; ++i) {
        Token token;
        EXPECT_OK(TakeAndBlock(&server, {task, 0}, &token));
        for (uint64_t pause = random() % 4; pause > 0; --pause) std::this_thread::yield();
        ++begun[task];
        CommitOutcome outcome;
        EXPECT_OK(server.Commit(token.id, &outcome));
        ++ended[task];
        if (!outcome.to_apply.empty()) {
          EXPECT_OK(server.MarkApplied(outcome.to_apply.back().step));
        }
      }
    });
  }
  for (std::thread& worker : workers) worker.join();
  done = true;
  checker.join();
  const TokenStats stats = server.stats();
  EXPECT_EQ(stats.applied, kThreads * kSteps);
  EXPECT_EQ(stats.global_step, kThreads * kSteps);
}

// Four workers; others give them up, cancel them and let them leave. All come to their end.
void RunWorkers(std::unique_ptr<const Policy> policy, uint64_t seed) {
  constexpr int kThreads = 4, kSteps = 30;
  TokenServer server(std::move(policy));
  std::atomic<int64_t> tickets[kThreads] = {};
  std::atomic<int64_t> committed{0};
  std::vector<std::thread> workers;
  for (int task = 0; task < kThreads; ++task) {
    workers.emplace_back([&, task] {
      std::mt19937_64 random(seed * kThreads + static_cast<uint64_t>(task));
      for (int i = 0; i < kSteps; ++i) {
        const int64_t other = static_cast<int64_t>(random() % kThreads);
        Token token;
        const Status status = TakeAndBlock(&server, {task, i}, &token, &tickets[task]);
        if (!status.ok()) {
          EXPECT_EQ(static_cast<int>(status.code()), static_cast<int>(StatusCode::kCancelled));
          continue;
        }
        if (random() % 2 == 0) std::this_thread::yield();
        switch (random() % 16) {
          case 0:
            continue;  // Dies; its next incarnation takes again.
          case 1:
            server.GiveUp(other);
            break;
          case 2:
            server.CancelTake(tickets[other]);
            break;
          case 3:
            server.Leave(task);
            server.Join(task);
            break;
          default:
            break;
        }
        CommitOutcome outcome;
        EXPECT_OK(server.Commit(token.id, &outcome));
        if (outcome.counted) ++committed;
        if (!outcome.to_apply.empty() && random() % 8 != 0) {
          EXPECT_OK(server.MarkApplied(outcome.to_apply.back().step));
        }
        if (random() % 32 == 0) CheckEquation(server.stats());
      }
      server.Leave(task);
    });
  }
  for (std::thread& worker : workers) worker.join();
  for (int task = 0; task < kThreads; ++task) server.GiveUp(task);
  server.Flush(/*close_partial=*/true);
  const TokenStats stats = server.stats();
  CheckEquation(stats);
  EXPECT_EQ(stats.waiting, 0);
  EXPECT_EQ(stats.applied, committed.load());
}

TEST(NoThreadWaitsForEver) {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    const auto setting = static_cast<int64_t>(1 + seed % 4);
    RunWorkers(std::make_unique<HopBsPolicy>(setting), seed);
    RunWorkers(std::make_unique<HopBwPolicy>(setting), seed);
  }
}

}  // namespace

// The token server, driven by one thread with random calls, against a model of it that is written
// down in another way.
#include <algorithm>
#include <random>
#include <set>

#include "gba_tf/cc/core/token_server.h"
#include "tests/cc/take.h"
#include "tests/cc/testing.h"

namespace {

using gba::ClosedStep;
using gba::CommitOutcome;
using gba::GbaPolicy;
using gba::Token;
using gba::TokenServer;
using gba::TokenStats;
using gba_testing::Take;

// Keeps every token that ever was in one list, and counts by looking through it.
class Model {
 public:
  enum State { kOutstanding, kBuffered, kApplied, kDecayed, kLost };
  struct Item {
    int64_t value, task;
    State state;
  };

  Model(int64_t m, int64_t tolerance) : m_(m), tolerance_(tolerance) {}

  int64_t Count(State state) const {
    return std::count_if(items.begin(), items.end(),
                         [state](const Item& item) { return item.state == state; });
  }
  void GiveUp(int64_t task) {
    for (Item& item : items) {
      if (item.task == task && item.state == kOutstanding) item.state = kLost;
    }
    orphaned |= closers.count(task) > 0;
  }
  int64_t Take(int64_t task) {
    GiveUp(task);
    // Flushed steps take a step of their own: what they lack of M gradients counts as committed.
    const int64_t committed = Count(kBuffered) + Count(kApplied) + Count(kDecayed) + missing;
    items.push_back({(committed + Count(kOutstanding)) / m_, task, kOutstanding});
    return items.back().value;
  }
  void Close(int64_t closer) {
    missing += m_ - Count(kBuffered);
    for (Item& item : items) {
      if (item.state == kBuffered)
        item.state = step - item.value > tolerance_ ? kDecayed : kApplied;
    }
    unapplied.push_back(step++);
    closers.insert(closer);
  }
  // Returns the steps that are handed out.
  std::vector<int64_t> Commit(size_t id) {
    if (items[id].state == kOutstanding) {
      items[id].state = kBuffered;
      if (Count(kBuffered) == m_) {
        Close(items[id].task);
        return unapplied;
      }
    }
    return orphaned ? unapplied : std::vector<int64_t>{};
  }
  void MarkAll() {
    unapplied.clear();
    closers.clear();
    orphaned = false;
  }

  std::vector<Item> items;
  std::vector<int64_t> unapplied;
  std::set<int64_t> closers;
  int64_t step = 0;
  int64_t missing = 0;
  bool orphaned = false;

 private:
  const int64_t m_;
  const int64_t tolerance_;
};

std::vector<int64_t> Steps(const CommitOutcome& outcome) {
  std::vector<int64_t> steps;
  for (const ClosedStep& step : outcome.to_apply) steps.push_back(step.step);
  return steps;
}

TEST(RandomSequencesAgreeWithASequentialModel) {
  for (uint64_t seed = 1; seed <= 300; ++seed) {
    const int before = gba_testing::FailedExpectations();
    std::mt19937_64 random(seed);
    const int64_t m = 1 + static_cast<int64_t>(random() % 5);
    const int64_t tolerance = static_cast<int64_t>(random() % 3);
    auto server = std::make_unique<TokenServer>(std::make_unique<GbaPolicy>(m, tolerance));
    Model model(m, tolerance);
    for (int i = 0; i < 150; ++i) {
      const int64_t task = static_cast<int64_t>(random() % 5);
      const uint64_t action = random() % 32;
      if (action < 14) {
        const Token token = Take(server.get(), {task, 0});
        EXPECT_EQ(token.value, model.Take(task));
        EXPECT_EQ(token.id, static_cast<int64_t>(model.items.size()) - 1);
      } else if (action < 26 && !model.items.empty()) {
        // A recent token, most likely to be outstanding.
        const size_t id =
            model.items.size() - 1 - random() % std::min<size_t>(8, model.items.size());
        const bool counts = model.items[id].state == Model::kOutstanding;
        CommitOutcome outcome;
        EXPECT_OK(server->Commit(static_cast<int64_t>(id), &outcome));
        EXPECT_EQ(outcome.counted, counts);
        EXPECT_EQ(Steps(outcome), model.Commit(id));
        int64_t oldest = 0;
        for (const Model::Item& item : model.items) {
          if (item.state == Model::kOutstanding || item.state == Model::kBuffered) break;
          ++oldest;
        }
        EXPECT_EQ(outcome.oldest_live_id, oldest);
      } else if (action < 28) {
        server->GiveUp(task);
        model.GiveUp(task);
      } else if (action < 30 && model.step > 0) {
        EXPECT_OK(server->MarkApplied(model.step - 1));
        model.MarkAll();
      } else if (action == 30) {
        if (model.Count(Model::kBuffered) > 0) model.Close(-1);
        EXPECT_EQ(Steps(server->Flush(true)), model.unapplied);
      } else if (action == 31) {  // Save and restore.
        const std::string bytes = server->Serialize();
        server = std::make_unique<TokenServer>(std::make_unique<GbaPolicy>(m, tolerance));
        EXPECT_OK(server->Restore(bytes));
        for (int64_t t = 0; t < 5; ++t) model.GiveUp(t);
        model.orphaned = !model.unapplied.empty();
      }
      const TokenStats stats = server->stats();
      EXPECT_EQ(stats.issued, static_cast<int64_t>(model.items.size()));
      EXPECT_EQ(stats.outstanding, model.Count(Model::kOutstanding));
      EXPECT_EQ(stats.buffered, model.Count(Model::kBuffered));
      EXPECT_EQ(stats.applied, model.Count(Model::kApplied));
      EXPECT_EQ(stats.decayed, model.Count(Model::kDecayed));
      EXPECT_EQ(stats.lost, model.Count(Model::kLost));
      EXPECT_EQ(stats.global_step, model.step);
      EXPECT_EQ(stats.unapplied_steps, static_cast<int64_t>(model.unapplied.size()));
    }
    if (gba_testing::FailedExpectations() != before) {
      std::cerr << "  with seed " << seed << std::endl;
      return;
    }
  }
}

}  // namespace

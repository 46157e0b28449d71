// Token server and gradient buffers together, under thousands of random interleavings of workers
// that take, push, commit, die, are given up, apply, and of savers and flushes.
#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <thread>

#include "gba_tf/cc/core/gradient_buffer.h"
#include "gba_tf/cc/core/token_server.h"
#include "tests/cc/take.h"
#include "tests/cc/testing.h"

namespace {

using gba::Block;
using gba::ClosedStep;
using gba::CommitOutcome;
using gba::GbaPolicy;
using gba::GradientBuffer;
using gba::GradientPacker;
using gba::PreparedUpdate;
using gba::SparseDivisor;
using gba::Token;
using gba::TokenServer;
using gba::TokenStats;
using gba_testing::Take;

constexpr int64_t kElements = 37;  // Not a multiple of a vector.
constexpr int64_t kRows = 12;

std::vector<gba::VariableLayout> Layout() {
  gba::VariableLayout dense, sparse, apart;
  dense.num_elements = kElements;
  sparse.sparse = true;
  sparse.num_rows = kRows;
  sparse.row_width = 1;
  apart = sparse;
  apart.merge_rows = false;
  return {dense, sparse, apart};
}

// The gradient of a token is a function of its id. Float32 sums of these depend on their order.
float Dense(int64_t id, int64_t i) {
  return static_cast<float>((id * 7919 + i * 104729) % 1000003) * 1e-3f - 500.0f;
}
bool HasRow(int64_t id, int64_t row) { return (id * 31 + row * 17) % 5 < 2; }
float Row(int64_t id, int64_t row) { return Dense(id, 1000 + row); }
// Variable 2, where rows repeat: up to six occurrences.
int64_t NumOccurrences(int64_t id) { return id % 7; }
int64_t OccurringRow(int64_t id, int64_t i) { return (id + 3 * i * i) % kRows; }
float Occurrence(int64_t id, int64_t i) { return Dense(id, 2000 + i); }

Block Gradient(int64_t id) {
  std::vector<float> dense, rows, apart;
  std::vector<int64_t> ids, apart_ids;
  for (int64_t i = 0; i < kElements; ++i) dense.push_back(Dense(id, i));
  for (int64_t row = kRows - 1; row >= 0; --row) {
    if (!HasRow(id, row)) continue;
    ids.push_back(row);
    rows.push_back(Row(id, row));
  }
  for (int64_t i = 0; i < NumOccurrences(id); ++i) {
    apart_ids.push_back(OccurringRow(id, i));
    apart.push_back(Occurrence(id, i));
  }
  GradientPacker packer;
  EXPECT_OK(packer.Init(Layout(), {{dense.data(), nullptr, 0},
                                   {rows.data(), ids.data(), static_cast<int64_t>(ids.size())},
                                   {apart.data(), apart_ids.data(), NumOccurrences(id)}}));
  auto bytes = std::make_shared<std::vector<char>>(packer.packed_bytes());
  packer.Write(bytes->data());
  return {bytes->data(), bytes->size(), bytes};
}

// Compares an update, bit for bit, with plain loops over the step's gradients.
void CheckUpdate(const ClosedStep& step, const PreparedUpdate& update) {
  std::vector<float> dense(kElements), expected_dense(kElements);
  update.WriteDense(0, dense.data());
  std::vector<int64_t> ids(static_cast<size_t>(update.num_rows(1))), expected_ids;
  std::vector<float> rows(ids.size()), expected_rows;
  update.WriteSparse(1, ids.data(), rows.data());
  const auto divisor = static_cast<float>(step.divisor);
  for (int64_t i = 0; i < kElements; ++i) {
    float sum = 0;
    for (size_t m = 0; m < step.ids.size(); ++m) {
      if (step.weights[m] != 0) sum += Dense(step.ids[m], i);
    }
    expected_dense[static_cast<size_t>(i)] = sum / divisor;
  }
  for (int64_t row = 0; row < kRows; ++row) {
    float sum = 0;
    bool any = false;
    for (size_t m = 0; m < step.ids.size(); ++m) {
      if (step.weights[m] == 0 || !HasRow(step.ids[m], row)) continue;
      any = true;
      sum += Row(step.ids[m], row);
    }
    if (!any) continue;
    expected_ids.push_back(row);
    expected_rows.push_back(sum / divisor);
  }
  EXPECT_EQ(dense, expected_dense);
  EXPECT_EQ(ids, expected_ids);
  EXPECT_EQ(rows, expected_rows);

  std::vector<int64_t> apart_ids(static_cast<size_t>(update.num_rows(2))), expected_apart_ids;
  std::vector<float> apart(apart_ids.size()), expected_apart;
  update.WriteSparse(2, apart_ids.data(), apart.data());
  for (size_t m = 0; m < step.ids.size(); ++m) {
    if (step.weights[m] == 0) continue;
    for (int64_t i = 0; i < NumOccurrences(step.ids[m]); ++i) {
      expected_apart_ids.push_back(OccurringRow(step.ids[m], i));
      expected_apart.push_back(Occurrence(step.ids[m], i) / divisor);
    }
  }
  EXPECT_EQ(apart_ids, expected_apart_ids);
  EXPECT_EQ(apart, expected_apart);
}

void CheckEquation(const TokenStats& s) {
  EXPECT_EQ(s.applied + s.decayed + s.lost + s.outstanding + s.buffered, s.issued);
  int64_t counted = 0;
  for (const auto& [staleness, count] : s.staleness) counted += count;
  EXPECT_EQ(counted, s.applied + s.decayed);
}

// A parameter server: applies each step once and in order, however often it is handed out.
class ParameterServer {
 public:
  ParameterServer() : buffer_(Layout(), SparseDivisor::kGradientsPerUpdate) {}

  GradientBuffer* buffer() { return &buffer_; }

  // Applies the first `num_steps` of the outcome: fewer than all, if the worker dies meanwhile.
  void Apply(const CommitOutcome& outcome, size_t num_steps) {
    std::lock_guard<std::mutex> lock(mu_);
    for (size_t i = 0; i < num_steps; ++i) {
      const ClosedStep& step = outcome.to_apply[i];
      if (step.step < static_cast<int64_t>(applied_.size())) continue;
      EXPECT_EQ(step.step, static_cast<int64_t>(applied_.size()));
      PreparedUpdate update;
      ASSERT_OK(buffer_.Prepare(step, &update));
      CheckUpdate(step, update);
      applied_.push_back(step);
      buffer_.Release(
          step, outcome.oldest_live_id,
          {outcome.to_apply.begin() + static_cast<int64_t>(i) + 1, outcome.to_apply.end()});
    }
  }

  const std::vector<ClosedStep>& applied() const { return applied_; }

 private:
  GradientBuffer buffer_;
  std::mutex mu_;
  std::vector<ClosedStep> applied_;  // Guarded by mu_ while threads run.
};

struct Run {
  explicit Run(int64_t m, int64_t tolerance)
      : capacity(m), server(std::make_unique<GbaPolicy>(m, tolerance)) {}
  const int64_t capacity;
  TokenServer server;
  ParameterServer parameter_servers[2];
  std::atomic<int64_t> counted{0};
  std::atomic<int> waiting{0};  // Workers that have yet to start: all start together.
};

// Takes a commit's outcome to the parameter servers; dies on the way if `fate` says so.
void ApplyAndMark(Run* run, const CommitOutcome& outcome, unsigned fate) {
  if (outcome.to_apply.empty() || fate == 0) return;
  for (ParameterServer& ps : run->parameter_servers) {
    // Fate 1: dies after the first step of the first parameter server.
    ps.Apply(outcome, fate == 1 ? 1 : outcome.to_apply.size());
    if (fate == 1) return;
  }
  if (fate == 2) return;  // Dies before it can mark the steps.
  EXPECT_OK(run->server.MarkApplied(outcome.to_apply.back().step));
  if (fate == 3) EXPECT_OK(run->server.MarkApplied(outcome.to_apply.back().step));
}

void Work(Run* run, int64_t task, int num_tokens, uint64_t seed) {
  std::mt19937_64 random(seed);
  // Lets others in between any two calls, also on a machine with few cores.
  const auto pause = [&random] {
    if (random() % 2 == 0) std::this_thread::yield();
  };
  --run->waiting;
  while (run->waiting > 0) std::this_thread::yield();
  std::vector<gba::TokenId> own;
  for (int i = 0; i < num_tokens; ++i) {
    const Token token = Take(&run->server, {task, i});
    own.push_back(token.id);
    pause();
    if (random() % 16 == 0) continue;  // Dies before the push; its next incarnation takes again.
    const Block block = Gradient(token.id);
    const bool both = random() % 16 != 0;
    EXPECT_OK(run->parameter_servers[0].buffer()->Push(token.id, block));
    pause();
    if (!both) {  // Dies between pushes.
      run->server.GiveUp(task);
      continue;
    }
    EXPECT_OK(run->parameter_servers[1].buffer()->Push(token.id, block));
    if (random() % 16 == 0) continue;  // Dies between push and commit.
    if (random() % 16 == 0) {          // Somebody gives up a worker, dead or not.
      for (gba::TokenId id : run->server.GiveUp(static_cast<int64_t>(random() % 4))) {
        // Commits of a lost token may still come, and do not count.
        run->parameter_servers[random() % 2].buffer()->Drop({id});
      }
    }
    pause();
    CommitOutcome outcome;
    EXPECT_OK(run->server.Commit(token.id, &outcome));
    if (outcome.counted) ++run->counted;
    pause();
    ApplyAndMark(run, outcome, static_cast<unsigned>(random() % 16));
    if (random() % 8 == 0) {  // Commits an old token again, and then does not count.
      EXPECT_OK(run->server.Commit(own[random() % own.size()], &outcome));
      EXPECT_EQ(outcome.counted, false);
      ApplyAndMark(run, outcome, 15);
    }
    if (random() % 64 == 0) ApplyAndMark(run, run->server.Flush(true), 15);
  }
}

void CheckEnd(Run* run, bool flushed_in_between) {
  // The end of training: every worker is gone, the rest is applied.
  for (int64_t task = 0; task < 4; ++task) run->server.GiveUp(task);
  const CommitOutcome rest = run->server.Flush(true);
  ApplyAndMark(run, rest, 15);
  const TokenStats stats = run->server.stats();
  CheckEquation(stats);
  EXPECT_EQ(stats.outstanding, 0);
  EXPECT_EQ(stats.buffered, 0);
  EXPECT_EQ(stats.unapplied_steps, 0);
  EXPECT_EQ(stats.applied + stats.decayed, run->counted.load());

  std::set<gba::TokenId> seen;
  int64_t weight_one = 0;
  const std::vector<ClosedStep>& applied = run->parameter_servers[0].applied();
  ASSERT_EQ(static_cast<int64_t>(applied.size()), stats.global_step);
  ASSERT_EQ(run->parameter_servers[1].applied().size(), applied.size());
  for (size_t k = 0; k < applied.size(); ++k) {
    const ClosedStep& step = applied[k];
    if (!flushed_in_between && k + 1 < applied.size()) {
      EXPECT_EQ(static_cast<int64_t>(step.ids.size()), run->capacity);
    }
    EXPECT_EQ(step.divisor, static_cast<int64_t>(step.ids.size()));
    for (gba::TokenId id : step.ids) {
      EXPECT_EQ(seen.insert(id).second, true);
      EXPECT_EQ(id >= 0 && id < stats.issued, true);
    }
    for (float weight : step.weights) weight_one += weight == 1.0f;
    // The same on every parameter server.
    EXPECT_EQ(run->parameter_servers[1].applied()[k].ids, step.ids);
    EXPECT_EQ(run->parameter_servers[1].applied()[k].weights, step.weights);
  }
  EXPECT_EQ(static_cast<int64_t>(seen.size()), stats.applied + stats.decayed);
  EXPECT_EQ(weight_one, stats.applied);
  for (ParameterServer& ps : run->parameter_servers) {
    // As the next release would.
    ps.buffer()->Release({}, rest.oldest_live_id, {});
    EXPECT_EQ(ps.buffer()->stats().num_gradients, 0);
    EXPECT_EQ(ps.buffer()->stats().num_bytes, 0);
  }
}

TEST(ThousandsOfInterleavingsKeepEveryPromise) {
  constexpr uint64_t kRuns = 3000;
  for (uint64_t seed = 1; seed <= kRuns; ++seed) {
    const int before = gba_testing::FailedExpectations();
    std::mt19937_64 random(seed);
    Run run(1 + static_cast<int64_t>(random() % 5), static_cast<int64_t>(random() % 3));
    std::atomic<bool> done{false};
    std::thread checker([&] {
      while (!done) {
        CheckEquation(run.server.stats());
        // A save at any moment restores, with outstanding tokens as lost.
        TokenServer restored(std::make_unique<GbaPolicy>(run.capacity, 0));
        EXPECT_OK(restored.Restore(run.server.Serialize()));
        const TokenStats stats = restored.stats();
        CheckEquation(stats);
        EXPECT_EQ(stats.outstanding, 0);
        std::this_thread::yield();
      }
    });
    std::vector<std::thread> workers;
    run.waiting = 3;
    for (int64_t task = 0; task < 3; ++task) {
      workers.emplace_back(Work, &run, task, 12, seed * 1000 + static_cast<uint64_t>(task));
    }
    for (std::thread& worker : workers) worker.join();
    done = true;
    checker.join();
    CheckEnd(&run, /*flushed_in_between=*/true);
    if (gba_testing::FailedExpectations() != before) {
      std::cerr << "  with seed " << seed << std::endl;
      return;
    }
  }
}

TEST(WithoutFlushesEveryStepHasMDistinctGradients) {
  for (int64_t m : {1, 2, 3, 8}) {
    Run run(m, 4);
    std::vector<std::thread> workers;
    for (int64_t task = 0; task < 4; ++task) {
      workers.emplace_back([&run, task] {
        for (int i = 0; i < 200; ++i) {
          const Token token = Take(&run.server, {task, 0});
          for (ParameterServer& ps : run.parameter_servers) {
            EXPECT_OK(ps.buffer()->Push(token.id, Gradient(token.id)));
          }
          CommitOutcome outcome;
          EXPECT_OK(run.server.Commit(token.id, &outcome));
          EXPECT_EQ(outcome.counted, true);
          ++run.counted;
          ApplyAndMark(&run, outcome, 15);
        }
      });
    }
    for (std::thread& worker : workers) worker.join();
    CheckEnd(&run, /*flushed_in_between=*/false);
    EXPECT_EQ(run.server.stats().issued, 800);
    EXPECT_EQ(run.server.stats().lost, 0);
    EXPECT_EQ(run.server.stats().global_step, (800 + m - 1) / m);
  }
}

// The same gradients in random orders of pushes: the bits of a plain loop, each time.
TEST(TheSameSetOfGradientsGivesTheSameBits) {
  std::mt19937_64 random(5);
  ClosedStep step{0, {}, {}, 32};
  for (int64_t id = 0; id < 32; ++id) {
    step.ids.push_back(3 * id);
    step.weights.push_back(id % 5 == 0 ? 0.0f : 1.0f);
  }
  std::vector<int64_t> order = step.ids;
  for (int repeat = 0; repeat < 50; ++repeat) {
    std::shuffle(order.begin(), order.end(), random);
    GradientBuffer buffer(Layout(), SparseDivisor::kGradientsPerUpdate);
    for (int64_t id : order) EXPECT_OK(buffer.Push(id, Gradient(id)));
    PreparedUpdate update;
    ASSERT_OK(buffer.Prepare(step, &update));
    CheckUpdate(step, update);
  }
}

}  // namespace

#include "gba_tf/cc/core/token_server.h"

#include <cstring>
#include <limits>

#include "tests/cc/take.h"
#include "tests/cc/testing.h"

namespace {

using gba::ClosedStep;
using gba::CommitOutcome;
using gba::GbaPolicy;
using gba::StatusCode;
using gba::Token;
using gba::TokenServer;
using gba::TokenStats;
using gba_testing::Take;

std::unique_ptr<GbaPolicy> Policy(int64_t gradients_per_update, int64_t tolerance) {
  return std::make_unique<GbaPolicy>(gradients_per_update, tolerance);
}

CommitOutcome Commit(TokenServer* server, gba::TokenId id) {
  CommitOutcome outcome;
  EXPECT_OK(server->Commit(id, &outcome));
  return outcome;
}

std::vector<int64_t> Steps(const CommitOutcome& outcome) {
  std::vector<int64_t> steps;
  for (const ClosedStep& step : outcome.to_apply) steps.push_back(step.step);
  return steps;
}

std::vector<int64_t> Counts(const TokenStats& s) {
  return {s.issued, s.applied, s.decayed, s.lost, s.outstanding, s.buffered};
}

using Ints = std::vector<int64_t>;

TEST(ExampleInTheHeader) {
  TokenServer server(Policy(2, 4));
  const Token a = Take(&server, {0, 0});
  const Token b = Take(&server, {1, 0});
  EXPECT_EQ(a.id, 0);
  EXPECT_EQ(a.value, 0);
  EXPECT_EQ(b.id, 1);
  EXPECT_EQ(b.value, 0);
  const CommitOutcome first = Commit(&server, 1);
  EXPECT_EQ(first.counted, true);
  EXPECT_EQ(Steps(first), Ints{});
  EXPECT_EQ(Take(&server, {1, 0}).value, 1);
  const CommitOutcome second = Commit(&server, 0);
  ASSERT_EQ(Steps(second), Ints{0});
  EXPECT_EQ(second.to_apply[0].ids, (Ints{0, 1}));
  EXPECT_EQ(second.to_apply[0].weights, (std::vector<float>{1, 1}));
  EXPECT_EQ(second.to_apply[0].divisor, 2);
  EXPECT_EQ(second.oldest_live_id, 2);  // Worker 1 holds it.
}

TEST(EveryValueOccursMTimes) {
  TokenServer server(Policy(3, 4));
  Ints values;
  for (int worker = 0; worker < 9; ++worker) values.push_back(Take(&server, {worker, 0}).value);
  EXPECT_EQ(values, (Ints{0, 0, 0, 1, 1, 1, 2, 2, 2}));
}

TEST(LostTokensDoNotMakeTheValuesDrift) {
  TokenServer server(Policy(2, 4));
  Ints values;
  for (int i = 0; i < 5; ++i) values.push_back(Take(&server, {7, i}).value);  // Takes and dies.
  EXPECT_EQ(values, (Ints{0, 0, 0, 0, 0}));
  EXPECT_EQ(Take(&server, {8, 0}).value, 0);
  EXPECT_EQ(Take(&server, {9, 0}).value, 1);
  EXPECT_EQ(Counts(server.stats()), (Ints{7, 0, 0, 4, 3, 0}));
}

TEST(StaleGradientIsCountedAsDecayedAndTakesItsPlace) {
  TokenServer server(Policy(2, 0));
  const Token slow = Take(&server, {0, 0});
  for (int i = 0; i < 2; ++i)
    Commit(&server, Take(&server, {1, 0}).id);  // Ids 1 and 2 close step 0.
  Commit(&server, Take(&server, {1, 0}).id);    // Id 3.
  const CommitOutcome outcome = Commit(&server, slow.id);
  ASSERT_EQ(Steps(outcome), (Ints{0, 1}));
  EXPECT_EQ(outcome.to_apply[0].ids, (Ints{1, 2}));
  EXPECT_EQ(outcome.to_apply[1].ids, (Ints{0, 3}));
  EXPECT_EQ(outcome.to_apply[1].weights, (std::vector<float>{0, 1}));
  EXPECT_EQ(outcome.to_apply[1].divisor, 2);
  EXPECT_EQ(Counts(server.stats()), (Ints{4, 3, 1, 0, 0, 0}));
  // Ids 1 and 3: value equal to the step. Id 2 was taken with two in flight, so it has value 1 in
  // step 0. Id 0: value 0 in step 1.
  EXPECT_EQ(server.stats().staleness, (std::map<int64_t, int64_t>{{-1, 1}, {0, 2}, {1, 1}}));
}

TEST(SecondCommitOfAnIdDoesNotCount) {
  TokenServer server(Policy(2, 4));
  Take(&server, {0, 0});
  EXPECT_EQ(Commit(&server, 0).counted, true);
  EXPECT_EQ(Commit(&server, 0).counted, false);
  EXPECT_EQ(Counts(server.stats()), (Ints{1, 0, 0, 0, 0, 1}));
  Take(&server, {0, 0});
  EXPECT_EQ(Commit(&server, 1).counted, true);
  EXPECT_EQ(Commit(&server, 1).counted, false);
  EXPECT_EQ(server.stats().global_step, 1);
}

TEST(CommitOfAGivenUpTokenDoesNotCount) {
  TokenServer server(Policy(1, 4));
  Take(&server, {0, 0});
  EXPECT_EQ(server.GiveUp(0), Ints{0});
  EXPECT_EQ(server.GiveUp(0), Ints{});
  const CommitOutcome outcome = Commit(&server, 0);
  EXPECT_EQ(outcome.counted, false);
  EXPECT_EQ(Steps(outcome), Ints{});
  EXPECT_EQ(outcome.oldest_live_id, 1);
  EXPECT_EQ(Counts(server.stats()), (Ints{1, 0, 0, 1, 0, 0}));
}

TEST(TakeGivesUpTheTokenThatTheTaskStillHolds) {
  TokenServer server(Policy(4, 4));
  Take(&server, {3, 100});
  Take(&server, {3, 101});
  EXPECT_EQ(Commit(&server, 0).counted, false);
  EXPECT_EQ(Commit(&server, 1).counted, true);
  EXPECT_EQ(Counts(server.stats()), (Ints{2, 0, 0, 1, 0, 1}));
}

TEST(CommitOfAnIdThatWasNeverIssuedIsNotFound) {
  TokenServer server(Policy(1, 4));
  Take(&server, {0, 0});
  CommitOutcome outcome;
  EXPECT_ERROR(server.Commit(1, &outcome), StatusCode::kNotFound, "in [0, 1), found 1");
  EXPECT_ERROR(server.Commit(-1, &outcome), StatusCode::kNotFound, "found -1");
}

TEST(ClosingCommitIsHandedEveryUnappliedStepInOrder) {
  TokenServer server(Policy(1, 4));
  Take(&server, {0, 0});
  Take(&server, {1, 0});
  Take(&server, {2, 0});
  EXPECT_EQ(Steps(Commit(&server, 0)), (Ints{0}));
  EXPECT_EQ(Steps(Commit(&server, 2)), (Ints{0, 1}));
  EXPECT_OK(server.MarkApplied(0));
  EXPECT_EQ(Steps(Commit(&server, 1)), (Ints{1, 2}));
  EXPECT_EQ(server.stats().unapplied_steps, 2);
  EXPECT_OK(server.MarkApplied(2));
  EXPECT_EQ(server.stats().unapplied_steps, 0);
  EXPECT_OK(server.MarkApplied(2));
  EXPECT_OK(server.MarkApplied(0));
  EXPECT_ERROR(server.MarkApplied(3), StatusCode::kFailedPrecondition, "in [0, 3), found 3");
  EXPECT_ERROR(server.MarkApplied(-1), StatusCode::kFailedPrecondition, "found -1");
}

TEST(NonClosingCommitIsHandedNothingWhileTheClosingWorkerApplies) {
  TokenServer server(Policy(2, 4));
  for (int worker = 0; worker < 3; ++worker) Take(&server, {worker, 0});
  Commit(&server, 0);
  EXPECT_EQ(Steps(Commit(&server, 1)), (Ints{0}));
  EXPECT_EQ(Steps(Commit(&server, 2)), (Ints{}));
}

TEST(StepOfAGivenUpWorkerIsHandedToTheNextCommit) {
  TokenServer server(Policy(2, 4));
  for (int worker = 0; worker < 3; ++worker) Take(&server, {worker, 0});
  Commit(&server, 0);
  Commit(&server, 1);                   // Worker 1 closes step 0 and dies.
  EXPECT_EQ(server.GiveUp(0), Ints{});  // Another worker's death makes no difference.
  EXPECT_EQ(Steps(Commit(&server, 0)), (Ints{}));
  EXPECT_EQ(server.GiveUp(1), Ints{});
  EXPECT_EQ(Steps(Commit(&server, 2)), (Ints{0}));
  EXPECT_EQ(Steps(Commit(&server, 2)), (Ints{0}));  // Until it is marked as applied.
  EXPECT_OK(server.MarkApplied(0));
  EXPECT_EQ(Steps(Commit(&server, 2)), (Ints{}));
}

TEST(StepOfAWorkerThatTakesAnotherTokenIsHandedToTheNextCommit) {
  TokenServer server(Policy(2, 4));
  for (int worker = 0; worker < 3; ++worker) Take(&server, {worker, 0});
  Commit(&server, 0);
  Commit(&server, 1);
  Take(&server, {0, 0});  // Worker 0 did not close step 0.
  EXPECT_EQ(Steps(Commit(&server, 1)), (Ints{}));
  Take(&server, {1, 1});
  EXPECT_EQ(Steps(Commit(&server, 2)), (Ints{0}));
}

TEST(FlushClosesThePartialBufferWithItsOwnCount) {
  TokenServer server(Policy(4, 4));
  for (int worker = 0; worker < 4; ++worker) Take(&server, {worker, 0});
  for (int id : {2, 0, 1}) Commit(&server, id);
  const CommitOutcome outcome = server.Flush(true);
  ASSERT_EQ(Steps(outcome), (Ints{0}));
  EXPECT_EQ(outcome.to_apply[0].ids, (Ints{0, 1, 2}));
  EXPECT_EQ(outcome.to_apply[0].divisor, 3);
  EXPECT_EQ(outcome.oldest_live_id, 3);
  EXPECT_EQ(Counts(server.stats()), (Ints{4, 3, 0, 0, 1, 0}));
  EXPECT_EQ(Steps(server.Flush(true)), (Ints{0}));  // Still unapplied; nothing new to close.
  EXPECT_OK(server.MarkApplied(0));
  EXPECT_EQ(Steps(server.Flush(true)), (Ints{}));
  EXPECT_EQ(Take(&server, {0, 0}).value, 1);  // Step 1 + floor(1 outstanding / 4).
}

TEST(FlushThatKeepsThePartialBufferOnlyHandsOutClosedSteps) {
  TokenServer server(Policy(2, 4));
  for (int worker = 0; worker < 3; ++worker) Take(&server, {worker, 0});
  for (int id : {0, 1, 2}) Commit(&server, id);
  const CommitOutcome outcome = server.Flush(/*close_partial=*/false);
  ASSERT_EQ(Steps(outcome), (Ints{0}));
  EXPECT_EQ(outcome.to_apply[0].ids, (Ints{0, 1}));
  EXPECT_EQ(outcome.oldest_live_id, 2);
  EXPECT_EQ(Counts(server.stats()), (Ints{3, 2, 0, 0, 0, 1}));
  EXPECT_OK(server.MarkApplied(0));
  EXPECT_EQ(Steps(server.Flush(/*close_partial=*/false)), (Ints{}));
}

TEST(OldestLiveIdIsTheSmallestOutstandingOrBufferedOne) {
  TokenServer server(Policy(2, 4));
  for (int worker = 0; worker < 4; ++worker) Take(&server, {worker, 0});
  EXPECT_EQ(Commit(&server, 1).oldest_live_id, 0);
  server.GiveUp(0);
  EXPECT_EQ(Commit(&server, 1).oldest_live_id, 1);
  EXPECT_EQ(Commit(&server, 3).oldest_live_id, 2);
  EXPECT_EQ(Commit(&server, 2).oldest_live_id, 2);
  EXPECT_EQ(server.Flush(true).oldest_live_id, 4);
}

// 6 tokens: 0, 1 applied in step 0 (unapplied), 2 lost, 3 buffered, 4, 5 outstanding.
void Fill(TokenServer* server) {
  for (int worker = 0; worker < 4; ++worker) Take(server, {worker, 0});
  Commit(server, 1);
  Commit(server, 0);
  Commit(server, 3);
  server->GiveUp(2);
  Take(server, {4, 0});
  Take(server, {5, 0});
}

TEST(RestoredServerGoesOnWhereTheSavedOneStood) {
  TokenServer saved(Policy(2, 4));
  Fill(&saved);
  EXPECT_EQ(Counts(saved.stats()), (Ints{6, 2, 0, 1, 2, 1}));
  TokenServer restored(Policy(2, 4));
  Take(&restored, {0, 0});
  EXPECT_OK(restored.Restore(saved.Serialize()));
  EXPECT_EQ(Counts(restored.stats()), (Ints{6, 2, 0, 3, 0, 1}));
  EXPECT_EQ(restored.stats().global_step, 1);
  EXPECT_EQ(restored.stats().unapplied_steps, 1);
  EXPECT_EQ(restored.stats().staleness, (std::map<int64_t, int64_t>{{0, 2}}));
  EXPECT_EQ(restored.Serialize() == restored.Serialize(), true);
  const CommitOutcome late = Commit(&restored, 4);
  EXPECT_EQ(late.counted, false);
  EXPECT_EQ(Steps(late), (Ints{0}));  // Nobody else will apply it.
  EXPECT_EQ(late.oldest_live_id, 3);
  const Token next = Take(&restored, {0, 0});
  EXPECT_EQ(next.id, 6);
  EXPECT_EQ(next.value, 1);
  const CommitOutcome outcome = Commit(&restored, 6);
  ASSERT_EQ(Steps(outcome), (Ints{0, 1}));
  EXPECT_EQ(outcome.to_apply[0].ids, (Ints{0, 1}));
  EXPECT_EQ(outcome.to_apply[0].weights, (std::vector<float>{1, 1}));
  EXPECT_EQ(outcome.to_apply[0].divisor, 2);
  EXPECT_EQ(outcome.to_apply[1].ids, (Ints{3, 6}));
  // Id 3 was taken with value floor(3 / 2) = 1, as was id 6: staleness 0.
  EXPECT_EQ(restored.stats().staleness, (std::map<int64_t, int64_t>{{0, 4}}));
}

TEST(SavedTokenKeepsItsValue) {
  TokenServer saved(Policy(2, 0));
  Take(&saved, {0, 0});
  for (int i = 0; i < 2; ++i) Commit(&saved, Take(&saved, {1, 0}).id);
  EXPECT_OK(saved.MarkApplied(0));
  Commit(&saved, 0);  // Value 0, buffered in step 1: will be too stale.
  TokenServer restored(Policy(2, 0));
  EXPECT_OK(restored.Restore(saved.Serialize()));
  const CommitOutcome outcome = Commit(&restored, Take(&restored, {0, 0}).id);
  ASSERT_EQ(Steps(outcome), (Ints{1}));
  EXPECT_EQ(outcome.to_apply[0].weights, (std::vector<float>{0, 1}));
}

TEST(RestoreRefusesDamageAndChangesNothing) {
  TokenServer saved(Policy(2, 4));
  Fill(&saved);
  const std::string bytes = saved.Serialize();
  TokenServer server(Policy(2, 4));
  Take(&server, {9, 0});
  const std::string before = server.Serialize();
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_EQ(server.Restore(bytes.substr(0, size)).ok(), false);
  }
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::string damaged = bytes;
    damaged[i] = static_cast<char>(damaged[i] ^ 1);
    EXPECT_EQ(server.Restore(damaged).ok(), false);
  }
  EXPECT_EQ(server.Restore(bytes + "x").ok(), false);
  EXPECT_EQ(server.Serialize() == before, true);
  EXPECT_EQ(server.stats().outstanding, 1);
  EXPECT_ERROR(server.Restore("short"), StatusCode::kInvalidArgument, "truncated");
  EXPECT_ERROR(server.Restore(bytes.substr(0, bytes.size() - 8)), StatusCode::kInvalidArgument,
               "damaged or truncated");
  std::string other_version = bytes;
  other_version[8] = 1;
  EXPECT_ERROR(server.Restore(other_version), StatusCode::kInvalidArgument,
               "Expected format version 2 of the saved token server state, found 1");
  EXPECT_ERROR(server.Restore(std::string(100, 'x')), StatusCode::kInvalidArgument,
               "Expected the saved state of a token server");
}

TEST(RestoreRefusesAnotherPolicyOrM) {
  TokenServer saved(Policy(2, 4));
  EXPECT_ERROR(
      TokenServer(std::make_unique<gba::HopBwPolicy>(2)).Restore(saved.Serialize()),
      StatusCode::kInvalidArgument,
      "saved with policy hop_bw, found gba. Go on in the mode it was saved in, or apply the "
      "buffered gradients");
  TokenServer backup_workers(std::make_unique<gba::HopBwPolicy>(2));
  EXPECT_ERROR(TokenServer(Policy(2, 4)).Restore(backup_workers.Serialize()),
               StatusCode::kInvalidArgument, "saved with policy gba, found hop_bw.");
  TokenServer server(Policy(3, 4));
  EXPECT_ERROR(server.Restore(saved.Serialize()), StatusCode::kInvalidArgument,
               "saved with 3 gradients per update, found 2");
}

// Writes `value` over the 8-byte number at `index` and makes the checksum right again.
std::string Forge(std::string bytes, size_t index, int64_t value) {
  std::memcpy(&bytes[index * 8], &value, 8);
  uint64_t hash = 0xcbf29ce484222325;
  for (size_t i = 0; i + 8 < bytes.size(); ++i) {
    hash = (hash ^ static_cast<unsigned char>(bytes[i])) * 0x100000001b3;
  }
  std::memcpy(&bytes[bytes.size() - 8], &hash, 8);
  return bytes;
}

TEST(RestoreSurvivesHostileNumbers) {
  TokenServer saved(Policy(2, 4));
  Fill(&saved);
  const std::string bytes = saved.Serialize();
  const size_t num_numbers = bytes.size() / 8 - 1;
  EXPECT_OK(TokenServer(Policy(2, 4)).Restore(Forge(bytes, 4, 6)));  // Forging keeps it readable.
  for (size_t i = 0; i < num_numbers; ++i) {
    for (int64_t value : {int64_t{-1}, int64_t{1} << 61, std::numeric_limits<int64_t>::max(),
                          std::numeric_limits<int64_t>::min()}) {
      TokenServer server(Policy(2, 4));
      // Whatever is accepted must be safe to use.
      if (!server.Restore(Forge(bytes, i, value)).ok()) continue;
      Take(&server, {0, 0});
      server.Flush(true);
    }
  }
  EXPECT_ERROR(TokenServer(Policy(2, 4)).Restore(Forge(bytes, 4, 7)), StatusCode::kInvalidArgument,
               "expected issued = applied + decayed + lost + buffered");
  EXPECT_ERROR(TokenServer(Policy(2, 4)).Restore(Forge(bytes, 9, 1000)),
               StatusCode::kInvalidArgument, "its lists do not fill its bytes");
}

}  // namespace

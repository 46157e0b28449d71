#include "gba_tf/cc/core/policy.h"

#include "tests/cc/testing.h"

namespace {

using gba::BspPolicy;
using gba::GbaPolicy;
using gba::HopBsPolicy;
using gba::HopBwPolicy;
using gba::PolicySettings;
using gba::StatusCode;
using gba::WorkerStanding;

TEST(WeightIsOneUpToTheToleranceAndZeroBeyond) {
  const GbaPolicy policy(4, 2);
  EXPECT_EQ(policy.Weight(7, 7), 1.0f);
  EXPECT_EQ(policy.Weight(7, 6), 1.0f);
  EXPECT_EQ(policy.Weight(7, 5), 1.0f);
  EXPECT_EQ(policy.Weight(7, 4), 0.0f);
  EXPECT_EQ(policy.Weight(7, 0), 0.0f);
}

TEST(TokenAheadOfTheStepHasWeightOne) {
  const GbaPolicy policy(4, 0);
  EXPECT_EQ(policy.Weight(3, 4), 1.0f);
  EXPECT_EQ(policy.Weight(0, 1000), 1.0f);
}

TEST(ToleranceZeroKeepsOnlyTheCurrentStep) {
  const GbaPolicy policy(1, 0);
  EXPECT_EQ(policy.Weight(1, 1), 1.0f);
  EXPECT_EQ(policy.Weight(1, 0), 0.0f);
}

TEST(OnlyGbaMakesAStaleGradientWorthLess) {
  EXPECT_EQ(BspPolicy(4).Weight(1000, 0), 1.0f);
  EXPECT_EQ(HopBsPolicy(1).Weight(1000, 0), 1.0f);
  EXPECT_EQ(HopBwPolicy(4).Weight(5, 5), 1.0f);
}

TEST(CapacityIsTheNumberOfGradientsPerUpdate) {
  EXPECT_EQ(GbaPolicy(32, 4).capacity(), 32);
  EXPECT_EQ(BspPolicy(32).capacity(), 32);
  EXPECT_EQ(HopBsPolicy(3).capacity(), 1);
  EXPECT_EQ(HopBwPolicy(7).capacity(), 7);
}

TEST(ATokenStandsForTheStepItsGradientWouldFill) {
  // Step 5 with 9 gradients in flight: the tenth is the second one of step 7.
  EXPECT_EQ(GbaPolicy(4, 0).TokenValue(5, 9), 7);
  EXPECT_EQ(BspPolicy(4).TokenValue(5, 9), 7);
  EXPECT_EQ(HopBsPolicy(3).TokenValue(5, 9), 14);
  EXPECT_EQ(HopBwPolicy(4).TokenValue(5, 9), 5);
}

TEST(OnlyBackupWorkersDropLateGradients) {
  EXPECT_EQ(GbaPolicy(4, 0).Accepts(5, 4), true);
  EXPECT_EQ(BspPolicy(4).Accepts(5, 4), true);
  EXPECT_EQ(HopBsPolicy(1).Accepts(5, 4), true);
  EXPECT_EQ(HopBwPolicy(4).Accepts(5, 5), true);
  EXPECT_EQ(HopBwPolicy(4).Accepts(5, 4), false);
}

TEST(BoundedStalenessAdmitsUpToTheBound) {
  const HopBsPolicy policy(2);
  WorkerStanding worker;
  worker.least_committed = 10;
  for (const auto& [committed, admitted] :
       std::map<int64_t, bool>{{10, true}, {11, true}, {12, false}, {13, false}}) {
    worker.committed = committed;
    EXPECT_EQ(policy.Admits(worker), admitted);
  }
  EXPECT_EQ(policy.waits(), true);
}

TEST(BackupWorkersAdmitOneGradientPerWorkerAndStep) {
  WorkerStanding worker;
  EXPECT_EQ(HopBwPolicy(2).Admits(worker), true);
  worker.has_open_gradient = true;
  EXPECT_EQ(HopBwPolicy(2).Admits(worker), false);
  EXPECT_EQ(HopBwPolicy(2).waits(), true);
}

TEST(BackupWorkersAdmitNobodyUntilTheClosedStepsAreApplied) {
  WorkerStanding worker;
  worker.update_is_pending = true;
  // Its gradient would be of parameters that the closed step has not reached.
  EXPECT_EQ(HopBwPolicy(2).Admits(worker), false);
  worker.has_open_gradient = true;
  EXPECT_EQ(HopBwPolicy(2).Admits(worker), false);
  // Bounded staleness does not ask for it.
  worker.has_open_gradient = false;
  EXPECT_EQ(HopBsPolicy(1).Admits(worker), true);
}

TEST(GbaAndBspWaitForNobody) {
  EXPECT_EQ(GbaPolicy(2, 0).waits(), false);
  EXPECT_EQ(BspPolicy(2).waits(), false);
}

PolicySettings Settings(const std::string& name, int64_t gradients_per_update) {
  PolicySettings settings;
  settings.name = name;
  settings.gradients_per_update = gradients_per_update;
  return settings;
}

TEST(PoliciesAreMadeByTheirNames) {
  const std::map<std::string, std::string> descriptions = {
      {"gba", "gba with M = 1 and staleness tolerance 0"},
      {"bsp", "bsp with M = 1"},
      {"hop_bs", "hop_bs with M = 1 and staleness bound 1"},
      {"hop_bw", "hop_bw with M = 1"},
  };
  for (const auto& [name, description] : descriptions) {
    std::unique_ptr<const gba::Policy> policy;
    ASSERT_OK(MakePolicy(Settings(name, 1), &policy));
    EXPECT_EQ(policy->name(), name);
    EXPECT_EQ(policy->Describe(), description);
  }
}

TEST(EverySettingThatAPolicyUsesIsInItsDescription) {
  PolicySettings settings{"gba", 3, 4, 5};
  std::unique_ptr<const gba::Policy> policy;
  ASSERT_OK(MakePolicy(settings, &policy));
  EXPECT_EQ(policy->Describe(), "gba with M = 3 and staleness tolerance 4");
  settings = {"hop_bs", 1, 4, 5};
  ASSERT_OK(MakePolicy(settings, &policy));
  EXPECT_EQ(policy->Describe(), "hop_bs with M = 1 and staleness bound 5");
}

TEST(SettingsThatWouldDeadlockAreRefusedByName) {
  std::unique_ptr<const gba::Policy> policy;
  const auto make = [&policy](const PolicySettings& settings) {
    return MakePolicy(settings, &policy);
  };
  EXPECT_ERROR(make(Settings("asp", 1)), StatusCode::kInvalidArgument,
               "policy: expected one of gba, bsp, hop_bs, hop_bw, found 'asp'");
  EXPECT_ERROR(make(Settings("gba", 0)), StatusCode::kInvalidArgument,
               "gradients_per_update: expected at least 1, found 0. It is global_batch_size");
  EXPECT_ERROR(make(Settings("bsp", -1)), StatusCode::kInvalidArgument, "found -1");
  EXPECT_ERROR(make(Settings("hop_bw", 0)), StatusCode::kInvalidArgument,
               "have fewer backup workers than workers");
  EXPECT_ERROR(make(Settings("hop_bs", 2)), StatusCode::kInvalidArgument,
               "gradients_per_update: expected 1 for hop_bs");
  PolicySettings settings{"hop_bs", 1, 0, 0};
  EXPECT_ERROR(make(settings), StatusCode::kInvalidArgument,
               "staleness_bound: expected at least 1 gradient, found 0");
  settings = {"gba", 4, -1, 1};
  EXPECT_ERROR(make(settings), StatusCode::kInvalidArgument,
               "staleness_tolerance: expected at least 0 global steps, found -1");
  EXPECT_EQ(policy == nullptr, true);
}

}  // namespace

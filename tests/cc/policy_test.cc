#include "gba_tf/cc/core/policy.h"

#include "tests/cc/testing.h"

namespace {

using gba::GbaPolicy;
using gba::StatusCode;

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

TEST(CapacityIsTheNumberOfGradientsPerUpdate) { EXPECT_EQ(GbaPolicy(32, 4).capacity(), 32); }

TEST(ValidateNamesTheSettingAndWhatWasFound) {
  EXPECT_OK(GbaPolicy::Validate(1, 0));
  EXPECT_ERROR(GbaPolicy::Validate(0, 4), StatusCode::kInvalidArgument,
               "gradients_per_update: expected at least 1, found 0");
  EXPECT_ERROR(GbaPolicy::Validate(4, -1), StatusCode::kInvalidArgument,
               "staleness_tolerance: expected at least 0 global steps, found -1");
}

}  // namespace

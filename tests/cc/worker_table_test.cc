#include "gba_tf/cc/core/worker_table.h"

#include "tests/cc/testing.h"

namespace {

using gba::WorkerTable;

void Commit(WorkerTable* table, int64_t task, int times) {
  for (int i = 0; i < times; ++i) table->Commit(task, 0.5);
}

TEST(AWorkerIsBusyFromJoinOrTakeUntilItLeavesOrIsGivenUp) {
  WorkerTable table;
  EXPECT_EQ(table.IsBusy(0), false);
  table.Join(0);
  table.Join(0);
  table.Arrive({1, 7});
  EXPECT_EQ(table.num_busy(), 2);
  table.Leave(0);
  table.Leave(0);
  table.GiveUp(1);
  EXPECT_EQ(table.IsBusy(0), false);
  EXPECT_EQ(table.IsBusy(1), false);
  EXPECT_EQ(table.num_busy(), 0);
}

TEST(TheLeastCommittedCountIsThatOfTheBusyWorkers) {
  WorkerTable table;
  for (int64_t task : {0, 1, 2}) table.Join(task);
  Commit(&table, 0, 5);
  Commit(&table, 1, 3);
  EXPECT_EQ(table.StandingOf(0, 0).committed, 5);
  EXPECT_EQ(table.StandingOf(0, 0).least_committed, 0);
  table.Leave(2);
  EXPECT_EQ(table.StandingOf(0, 0).least_committed, 3);
}

TEST(AWorkerThatJoinsStartsWhereTheSlowestBusyOneStands) {
  WorkerTable table;
  table.Join(0);
  table.Join(1);
  Commit(&table, 0, 5);
  Commit(&table, 1, 3);
  table.Join(2);
  EXPECT_EQ(table.StandingOf(2, 0).committed, 3);
  // One that is ahead keeps its count.
  table.Leave(0);
  table.Join(0);
  EXPECT_EQ(table.StandingOf(0, 0).committed, 5);
}

TEST(AWorkerThatJoinsWhenNobodyIsBusyStartsWhereTheSlowestOneStoodLast) {
  WorkerTable table;
  for (int64_t task : {0, 1, 2}) table.Join(task);
  table.Leave(2);
  Commit(&table, 0, 6);
  Commit(&table, 1, 4);
  table.Leave(0);
  table.Leave(1);
  table.Join(2);
  EXPECT_EQ(table.StandingOf(2, 0).committed, 4);
  table.Join(0);
  EXPECT_EQ(table.StandingOf(0, 0).least_committed, 4);
}

TEST(AProcessThatWasGivenUpIsBusyAgainWhenItCommitsOrJoins) {
  for (bool joins : {false, true}) {
    WorkerTable table;
    table.Arrive({0, 7});
    table.GiveUp(0);
    table.Arrive({0, 7});
    EXPECT_EQ(table.IsBusy(0), false);
    if (joins) {
      table.Join(0);
    } else {
      table.Commit(0, 1.0);
    }
    EXPECT_EQ(table.IsBusy(0), true);
  }
}

TEST(TheNextProcessOfATaskThatWasGivenUpIsBusyWhenItTakes) {
  WorkerTable table;
  table.Arrive({0, 7});
  table.GiveUp(0);
  table.Arrive({0, 8});
  EXPECT_EQ(table.IsBusy(0), true);
}

TEST(AnOpenGradientIsOneOfTheStepThatIsAskedFor) {
  WorkerTable table;
  table.Join(0);
  EXPECT_EQ(table.StandingOf(0, 0).has_open_gradient, false);
  table.SetBuffered(0, 3);
  EXPECT_EQ(table.StandingOf(0, 3).has_open_gradient, true);
  EXPECT_EQ(table.StandingOf(0, 4).has_open_gradient, false);
  table.ForgetBuffered();
  EXPECT_EQ(table.StandingOf(0, 3).has_open_gradient, false);
}

TEST(SecondsAddUpPerWorkerAndOutliveIt) {
  WorkerTable table;
  table.Join(5);
  table.Commit(3, 0.25);
  table.Commit(3, 0.5);
  table.Commit(1, 2.0);
  table.GiveUp(3);
  const std::vector<gba::WorkerSeconds> seconds = table.seconds();
  ASSERT_EQ(seconds.size(), size_t{2});
  EXPECT_EQ(seconds[0].task, 1);
  EXPECT_EQ(seconds[0].gradients, 1);
  EXPECT_EQ(seconds[0].seconds, 2.0);
  EXPECT_EQ(seconds[1].task, 3);
  EXPECT_EQ(seconds[1].gradients, 2);
  EXPECT_EQ(seconds[1].seconds, 0.75);
}

}  // namespace

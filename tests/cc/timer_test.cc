#include "gba_tf/cc/core/timer.h"

#include <future>

#include "tests/cc/testing.h"

namespace {

using gba::Timer;

TEST(CallsComeInTheOrderOfTheirMoments) {
  Timer timer;
  std::vector<int> calls;  // Written by the timer's thread alone, read when it is done.
  std::promise<void> done;
  const auto note = [&calls](int call) { return [&calls, call] { calls.push_back(call); }; };
  timer.After(0.06, [&] {
    calls.push_back(3);
    done.set_value();
  });
  timer.After(0.03, note(2));
  timer.After(0, note(0));
  timer.After(0, note(1));
  done.get_future().wait();
  EXPECT_EQ(calls, (std::vector<int>{0, 1, 2, 3}));
}

TEST(ACallComesNoEarlierThanAsked) {
  Timer timer;
  std::promise<std::chrono::steady_clock::time_point> called;
  const auto begun = std::chrono::steady_clock::now();
  timer.After(0.02, [&] { called.set_value(std::chrono::steady_clock::now()); });
  const auto waited = called.get_future().get() - begun;
  EXPECT_EQ(waited >= std::chrono::milliseconds(20), true);
}

TEST(ACallMayAskForAnother) {
  Timer timer;
  std::promise<void> done;
  timer.After(0, [&] { timer.After(0, [&] { done.set_value(); }); });
  done.get_future().wait();
}

TEST(CallsThatAreNotDueAreDroppedAtTheEnd) {
  std::atomic<int> calls{0};
  {
    Timer timer;
    timer.After(3600, [&] { ++calls; });
    timer.After(1e300, [&] { ++calls; });
  }
  EXPECT_EQ(calls.load(), 0);
}

TEST(ManyThreadsAskAtOnce) {
  std::atomic<int> calls{0};
  std::promise<void> done;
  Timer timer;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 250; ++i) {
        timer.After(1e-5 * i, [&] {
          if (++calls == 1000) done.set_value();
        });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  done.get_future().wait();
  EXPECT_EQ(calls.load(), 1000);
}

}  // namespace

#include "gba_tf/cc/core/timer.h"

#include <algorithm>
#include <utility>

namespace gba {
namespace {

// More would overflow the clock. Nobody lives to see the difference.
constexpr double kMaxSeconds = 1e9;

}  // namespace

Timer::Timer() : thread_([this] { Run(); }) {}

Timer::~Timer() {
  {
    std::lock_guard<std::mutex> lock(mu_);
    ends_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void Timer::After(double seconds, std::function<void()> call) {
  const auto wait = std::chrono::duration_cast<Clock::duration>(
      std::chrono::duration<double>(std::min(seconds, kMaxSeconds)));
  {
    std::lock_guard<std::mutex> lock(mu_);
    calls_.emplace(Clock::now() + wait, std::move(call));
  }
  changed_.notify_one();
}

void Timer::Run() {
  std::unique_lock<std::mutex> lock(mu_);
  while (!ends_) {
    if (calls_.empty()) {
      changed_.wait(lock);
      continue;
    }
    // A copy: the entry may be gone when the wait ends.
    const Clock::time_point next = calls_.begin()->first;
    if (Clock::now() < next) {
      changed_.wait_until(lock, next);
      continue;
    }
    const std::function<void()> call = std::move(calls_.begin()->second);
    calls_.erase(calls_.begin());
    lock.unlock();
    call();
    lock.lock();
  }
}

}  // namespace gba

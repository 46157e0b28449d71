// Calls functions later, all from one thread: a wait that holds no thread of its own.
#ifndef GBA_TF_CC_CORE_TIMER_H_
#define GBA_TF_CC_CORE_TIMER_H_

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

namespace gba {

// Thread-safe. No method blocks on anything but a short mutex, except the destructor.
class Timer {
 public:
  Timer();
  // Waits for the call that is running, if any; the calls that are not yet due are dropped.
  ~Timer();
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  // Calls `call` once, in the timer's thread, no earlier than in `seconds`: finite and at least 0.
  // Calls of the same moment come in the order of After. A call that takes long delays the others.
  void After(double seconds, std::function<void()> call);

 private:
  using Clock = std::chrono::steady_clock;

  void Run();

  std::mutex mu_;
  std::condition_variable changed_;
  // Guarded by mu_.
  std::multimap<Clock::time_point, std::function<void()>> calls_;
  bool ends_ = false;
  std::thread thread_;  // Last, because it uses the others.
};

}  // namespace gba

#endif  // GBA_TF_CC_CORE_TIMER_H_

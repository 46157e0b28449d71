#include "gba_tf/cc/core/worker_table.h"

#include <algorithm>
#include <limits>

namespace gba {

void WorkerTable::Join(int64_t task) { SetBusy(&workers_[task]); }

void WorkerTable::Arrive(WorkerId id) {
  Worker& worker = workers_[id.task];
  if (worker.given_up && worker.incarnation == id.incarnation) return;
  worker.incarnation = id.incarnation;
  SetBusy(&worker);
}

void WorkerTable::Leave(int64_t task) {
  const auto worker = workers_.find(task);
  if (worker != workers_.end()) SetIdle(&worker->second);
}

void WorkerTable::GiveUp(int64_t task) {
  const auto worker = workers_.find(task);
  if (worker == workers_.end()) return;
  SetIdle(&worker->second);
  worker->second.given_up = true;
}

void WorkerTable::Commit(int64_t task, double seconds) {
  Worker& worker = workers_[task];
  ++worker.committed;
  ++worker.gradients;
  worker.seconds += seconds;
  if (worker.given_up) SetBusy(&worker);
}

void WorkerTable::SetBuffered(int64_t task, GlobalStep step) { workers_[task].buffered_in = step; }

void WorkerTable::ForgetBuffered() {
  for (auto& [task, worker] : workers_) worker.buffered_in = kNone;
}

bool WorkerTable::IsBusy(int64_t task) const {
  const auto worker = workers_.find(task);
  return worker != workers_.end() && worker->second.busy;
}

WorkerStanding WorkerTable::StandingOf(int64_t task, GlobalStep step) {
  const Worker& worker = workers_[task];
  // Nobody to wait for: whoever joins later starts no lower than this one stands.
  if (num_busy_ == 0) floor_ = std::max(floor_, worker.committed);
  return {worker.committed, LeastCommitted(), worker.buffered_in == step};
}

std::vector<WorkerSeconds> WorkerTable::seconds() const {
  std::vector<WorkerSeconds> all;
  for (const auto& [task, worker] : workers_) {
    if (worker.gradients > 0) all.push_back({task, worker.gradients, worker.seconds});
  }
  return all;
}

void WorkerTable::SetBusy(Worker* worker) {
  worker->given_up = false;
  if (worker->busy) return;
  worker->committed = std::max(worker->committed, LeastCommitted());
  worker->busy = true;
  ++num_busy_;
}

void WorkerTable::SetIdle(Worker* worker) {
  if (!worker->busy) return;
  LeastCommitted();  // The floor, while this worker still counts.
  worker->busy = false;
  --num_busy_;
}

int64_t WorkerTable::LeastCommitted() {
  if (num_busy_ == 0) return floor_;
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const auto& [task, worker] : workers_) {
    if (worker.busy) least = std::min(least, worker.committed);
  }
  floor_ = std::max(floor_, least);
  return floor_;
}

}  // namespace gba

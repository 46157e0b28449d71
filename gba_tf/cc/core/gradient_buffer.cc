#include "gba_tf/cc/core/gradient_buffer.h"

#include <cstring>
#include <iterator>
#include <set>
#include <string>

#include "gba_tf/cc/core/aggregate.h"

namespace gba {
namespace {

Status CheckStep(const ClosedStep& step) {
  const std::string name = "Global step " + std::to_string(step.step) + ": ";
  if (step.ids.size() != step.weights.size()) {
    return Status::InvalidArgument(name + "expected one weight for each token, found " +
                                   std::to_string(step.ids.size()) + " tokens and " +
                                   std::to_string(step.weights.size()) + " weights.");
  }
  if (step.divisor < 1) {
    return Status::InvalidArgument(name + "expected a divisor of at least 1, found " +
                                   std::to_string(step.divisor) + ".");
  }
  for (size_t i = 0; i < step.ids.size(); ++i) {
    if (i > 0 && step.ids[i] <= step.ids[i - 1]) {
      return Status::InvalidArgument(name + "expected ascending token ids, found " +
                                     std::to_string(step.ids[i]) + " after " +
                                     std::to_string(step.ids[i - 1]) + ".");
    }
    if (step.weights[i] != 0.0f && step.weights[i] != 1.0f) {
      return Status::InvalidArgument(name + "expected weights of 0 or 1, found " +
                                     std::to_string(step.weights[i]) + " for token " +
                                     std::to_string(step.ids[i]) + ".");
    }
  }
  return Status();
}

// Calls visit(row) for every row of a gradient, in order.
template <typename Id, typename Visit>
void VisitRowsOf(const GradientView& gradient, const Visit& visit) {
  const char* ids = static_cast<const char*>(gradient.ids);
  for (int64_t i = 0; i < gradient.num_ids; ++i) {
    Id row;  // The block may be at any address.
    std::memcpy(&row, ids + i * static_cast<int64_t>(sizeof(Id)), sizeof(Id));
    visit(int64_t{row});
  }
}
template <typename Visit>
void VisitRows(IdType id_type, const GradientView& gradient, const Visit& visit) {
  if (id_type == IdType::kInt32) {
    VisitRowsOf<int32_t>(gradient, visit);
  } else {
    VisitRowsOf<int64_t>(gradient, visit);
  }
}

int64_t CountOccurrences(const std::vector<GradientView>& gradients) {
  int64_t count = 0;
  for (const GradientView& gradient : gradients) count += gradient.num_ids;
  return count;
}

// Orders the merged rows of one sparse variable over several gradients.
Status OrderRows(const VariableLayout& layout, const std::vector<GradientView>& gradients,
                 RowOrder* order) {
  const auto num_gradients = static_cast<int64_t>(gradients.size());
  Status status = order->Init(layout.num_rows, num_gradients, CountOccurrences(gradients));
  if (!status.ok()) return status;
  for (int64_t g = 0; g < num_gradients; ++g) {
    VisitRows(layout.id_type, gradients[static_cast<size_t>(g)],
              [&](int64_t row) { order->Add(row, g); });
  }
  order->Sort();
  return Status();
}

// For every occurrence of a row that is kept apart: the number of gradients that contain the row.
Status CountGradientsWithRow(const VariableLayout& layout,
                             const std::vector<GradientView>& gradients,
                             std::vector<int64_t>* counts) {
  const int64_t num_occurrences = CountOccurrences(gradients);
  RowOrder order;
  Status status = order.Init(layout.num_rows, num_occurrences, num_occurrences);
  if (!status.ok()) return status;
  std::vector<size_t> gradient_of;  // By occurrence.
  for (size_t g = 0; g < gradients.size(); ++g) {
    VisitRows(layout.id_type, gradients[g], [&](int64_t row) {
      order.Add(row, static_cast<int64_t>(gradient_of.size()));
      gradient_of.push_back(g);
    });
  }
  order.Sort();
  counts->resize(gradient_of.size());
  const uint64_t* end = order.begin();
  while (end != order.end()) {
    // The occurrences of one row are in the order of the gradients.
    const uint64_t* const begin = end;
    const auto gradient = [&](const uint64_t* key) {
      return gradient_of[static_cast<size_t>(order.Index(*key))];
    };
    int64_t count = 0;
    for (; end != order.end() && order.Row(*end) == order.Row(*begin); ++end) {
      count += end == begin || gradient(end) != gradient(end - 1);
    }
    for (const uint64_t* key = begin; key != end; ++key) {
      (*counts)[static_cast<size_t>(order.Index(*key))] = count;
    }
  }
  return Status();
}

std::vector<const void*> ValuesOf(const std::vector<GradientView>& gradients) {
  std::vector<const void*> values;
  for (const GradientView& gradient : gradients) values.push_back(gradient.values);
  return values;
}

}  // namespace

int64_t PreparedUpdate::num_rows(size_t variable) const { return variables_[variable].num_rows; }

void PreparedUpdate::WriteDense(size_t variable, void* values) const {
  const Variable& v = variables_[variable];
  SumDense(v.layout.value_type, ValuesOf(v.gradients), v.layout.num_elements, v.divisor, values);
}

void PreparedUpdate::WriteSparse(size_t variable, void* ids, void* values) const {
  const Variable& v = variables_[variable];
  if (v.layout.merge_rows) {
    SumSources(v.layout, v.order, ValuesOf(v.gradients), v.divisor, ids, values);
  } else {
    WriteRowsApart(v, static_cast<char*>(ids), static_cast<char*>(values));
  }
}

void PreparedUpdate::WriteRowsApart(const Variable& variable, char* ids, char* values) {
  const VariableLayout& layout = variable.layout;
  const auto id_bytes = static_cast<int64_t>(SizeOf(layout.id_type));
  const int64_t row_bytes = layout.row_width * static_cast<int64_t>(SizeOf(layout.value_type));
  auto row_divisor = variable.row_divisors.begin();
  for (const GradientView& gradient : variable.gradients) {
    if (gradient.num_ids == 0) continue;
    std::memcpy(ids, gradient.ids, static_cast<size_t>(gradient.num_ids * id_bytes));
    ids += gradient.num_ids * id_bytes;
    // A sum of one term is just its division. All rows at once, unless each has its own divisor.
    const bool one_divisor = variable.row_divisors.empty();
    const int64_t num_rows = one_divisor ? gradient.num_ids : 1;
    const char* from = static_cast<const char*>(gradient.values);
    for (int64_t i = 0; i < gradient.num_ids; i += num_rows) {
      SumDense(layout.value_type, {from}, num_rows * layout.row_width,
               one_divisor ? variable.divisor : *row_divisor++, values);
      from += num_rows * row_bytes;
      values += num_rows * row_bytes;
    }
  }
}

GradientBuffer::GradientBuffer(std::vector<VariableLayout> layout, SparseDivisor sparse_divisor)
    : layout_(std::move(layout)), sparse_divisor_(sparse_divisor) {}

Status GradientBuffer::Parse(TokenId id, Block block,
                             std::shared_ptr<const Gradient>* gradient) const {
  auto parsed = std::make_shared<Gradient>();
  parsed->block = std::move(block);
  Status status =
      ParsePackedGradient(layout_, parsed->block.data, parsed->block.num_bytes, &parsed->views);
  if (!status.ok()) {
    return Status::InvalidArgument("Gradient of token " + std::to_string(id) + ": " +
                                   status.message());
  }
  *gradient = std::move(parsed);
  return Status();
}

Status GradientBuffer::Push(TokenId id, Block block) {
  std::shared_ptr<const Gradient> gradient;
  Status status = Parse(id, std::move(block), &gradient);
  if (!status.ok()) return status;
  // Swapped with the one it replaces, which is freed after the lock is released.
  std::lock_guard<std::mutex> lock(mu_);
  std::shared_ptr<const Gradient>& kept = gradients_[id];
  num_bytes_ += static_cast<int64_t>(gradient->block.num_bytes);
  if (kept != nullptr) num_bytes_ -= static_cast<int64_t>(kept->block.num_bytes);
  kept.swap(gradient);
  return Status();
}

Status GradientBuffer::Prepare(const ClosedStep& step, PreparedUpdate* update) const {
  Status status = CheckStep(step);
  if (!status.ok()) return status;
  std::vector<std::shared_ptr<const Gradient>> gradients;
  {
    std::lock_guard<std::mutex> lock(mu_);
    for (size_t i = 0; i < step.ids.size(); ++i) {
      if (step.weights[i] == 0.0f) continue;
      const auto found = gradients_.find(step.ids[i]);
      if (found == gradients_.end()) {
        return Status::NotFound("Global step " + std::to_string(step.step) +
                                ": expected the gradient of token " + std::to_string(step.ids[i]) +
                                ", found none. Push it to every parameter server before it is "
                                "committed, and apply each step only once.");
      }
      gradients.push_back(found->second);
    }
  }

  PreparedUpdate prepared;
  prepared.variables_.resize(layout_.size());
  for (size_t v = 0; v < layout_.size(); ++v) {
    PreparedUpdate::Variable& variable = prepared.variables_[v];
    variable.layout = layout_[v];
    variable.divisor = step.divisor;
    for (const auto& gradient : gradients) variable.gradients.push_back(gradient->views[v]);
    if (!layout_[v].sparse) continue;
    const bool by_row = sparse_divisor_ == SparseDivisor::kGradientsWithRow;
    if (layout_[v].merge_rows) {
      if (by_row) variable.divisor = kNumberOfSummedRows;
      status = OrderRows(layout_[v], variable.gradients, &variable.order);
      variable.num_rows = variable.order.num_distinct();
    } else {
      if (by_row) {
        status = CountGradientsWithRow(layout_[v], variable.gradients, &variable.row_divisors);
      }
      variable.num_rows = CountOccurrences(variable.gradients);
    }
    if (!status.ok()) return status;
  }
  prepared.owners_.assign(gradients.begin(), gradients.end());
  *update = std::move(prepared);
  return Status();
}

GradientBuffer::GradientMap::iterator GradientBuffer::Extract(GradientMap::iterator position,
                                                              GradientMap* removed) {
  const auto next = std::next(position);
  num_bytes_ -= static_cast<int64_t>(position->second->block.num_bytes);
  removed->insert(gradients_.extract(position));
  return next;
}

void GradientBuffer::Release(const ClosedStep& applied, TokenId oldest_live_id,
                             const std::vector<ClosedStep>& keep) {
  std::set<TokenId> kept_ids;
  for (const ClosedStep& step : keep) kept_ids.insert(step.ids.begin(), step.ids.end());
  GradientMap removed;  // Before the lock: freed after it.
  std::lock_guard<std::mutex> lock(mu_);
  for (TokenId id : applied.ids) {
    const auto found = gradients_.find(id);
    if (found != gradients_.end()) Extract(found, &removed);
  }
  auto position = gradients_.begin();
  while (position != gradients_.end() && position->first < oldest_live_id) {
    position =
        kept_ids.count(position->first) > 0 ? std::next(position) : Extract(position, &removed);
  }
}

void GradientBuffer::Drop(const std::vector<TokenId>& ids) {
  GradientMap removed;  // Before the lock: freed after it.
  std::lock_guard<std::mutex> lock(mu_);
  for (TokenId id : ids) {
    const auto found = gradients_.find(id);
    if (found != gradients_.end()) Extract(found, &removed);
  }
}

BufferStats GradientBuffer::stats() const {
  std::lock_guard<std::mutex> lock(mu_);
  return {static_cast<int64_t>(gradients_.size()), num_bytes_};
}

std::vector<std::pair<TokenId, Block>> GradientBuffer::Snapshot() const {
  std::vector<std::pair<TokenId, Block>> gradients;
  std::lock_guard<std::mutex> lock(mu_);
  for (const auto& [id, gradient] : gradients_) gradients.emplace_back(id, gradient->block);
  return gradients;
}

Status GradientBuffer::Restore(std::vector<std::pair<TokenId, Block>> gradients) {
  GradientMap restored;
  int64_t num_bytes = 0;
  for (auto& [id, block] : gradients) {
    std::shared_ptr<const Gradient> gradient;
    Status status = Parse(id, std::move(block), &gradient);
    if (!status.ok()) return status;
    num_bytes += static_cast<int64_t>(gradient->block.num_bytes);
    if (!restored.emplace(id, std::move(gradient)).second) {
      return Status::InvalidArgument("Expected one gradient for each token, found token " +
                                     std::to_string(id) + " twice. Restore another checkpoint.");
    }
  }
  std::lock_guard<std::mutex> lock(mu_);
  gradients_.swap(restored);
  num_bytes_ = num_bytes;
  return Status();
}

}  // namespace gba

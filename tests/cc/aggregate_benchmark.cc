// How fast gradients are summed, next to memcpy in the same run: GB/s read, per second of one core.
//
// Bytes that are read from the gradients (values; for sparse ones ids too) count, and for memcpy
// the bytes that it reads. All gradients together are larger than any cache. Repeats of ours and
// memcpy alternate, and medians are reported.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gba_tf/cc/core/gradient_buffer.h"

namespace gba {
namespace {

constexpr int64_t kPoolBytes = int64_t{512} << 20;
constexpr int kRepeats = 9;

// Of this thread's core, so that other work on the machine counts less.
double Now() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double Seconds(const std::function<void()>& work) {
  const double start = Now();
  work();
  return Now() - start;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void Require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::exit(1);
}

std::shared_ptr<char> Allocate(size_t num_bytes) {
  const size_t rounded = (num_bytes + 63) / 64 * 64;
  char* memory = static_cast<char*>(std::aligned_alloc(64, rounded));
  std::memset(memory, 0, rounded);  // Touches every page.
  return std::shared_ptr<char>(memory, std::free);
}

struct Case {
  const char* name;
  VariableLayout layout;
  int64_t num_ids;  // Sparse: row ids per gradient.
};

Block Pack(const Case& c, std::mt19937_64* random) {
  const int64_t num_values =
      c.layout.sparse ? c.num_ids * c.layout.row_width : c.layout.num_elements;
  // Small whole numbers in every type: the speed must not depend on subnormals or NaN.
  std::vector<char> values(static_cast<size_t>(num_values) * SizeOf(c.layout.value_type));
  for (int64_t i = 0; i < num_values; ++i) {
    const float value = static_cast<float>(i % 7 + 1);
    const double wide = value;
    const uint16_t half = c.layout.value_type == ValueType::kFloat16 ? 0x3c00 : 0x3f80;
    const void* from = c.layout.value_type == ValueType::kFloat32 ? static_cast<const void*>(&value)
                       : c.layout.value_type == ValueType::kFloat64
                           ? static_cast<const void*>(&wide)
                           : &half;
    const size_t size = SizeOf(c.layout.value_type);
    std::memcpy(values.data() + static_cast<size_t>(i) * size, from, size);
  }
  std::vector<int64_t> ids;
  if (c.layout.sparse) {  // `num_ids` distinct rows, each set equally likely.
    for (int64_t row = 0; row < c.layout.num_rows; ++row) {
      const auto left = static_cast<uint64_t>(c.layout.num_rows - row);
      const auto wanted = static_cast<uint64_t>(c.num_ids) - ids.size();
      if ((*random)() % left < wanted) ids.push_back(row);
    }
  }
  GradientPacker packer;
  Require(packer.Init({c.layout}, {{values.data(), ids.data(), static_cast<int64_t>(ids.size())}}));
  std::shared_ptr<char> memory = Allocate(packer.packed_bytes());
  packer.Write(memory.get());
  return {memory.get(), packer.packed_bytes(), memory};
}

void Run(const Case& c, int64_t gradients_per_update) {
  std::mt19937_64 random(1);
  Case sized = c;
  int64_t bytes_each;
  if (c.layout.sparse) {
    bytes_each =
        c.num_ids * (c.layout.row_width * static_cast<int64_t>(SizeOf(c.layout.value_type)) +
                     static_cast<int64_t>(SizeOf(c.layout.id_type)));
  } else {
    bytes_each = kPoolBytes / gradients_per_update;
    sized.layout.num_elements = bytes_each / static_cast<int64_t>(SizeOf(c.layout.value_type));
  }
  // Small updates: several of them, taken in turn, so that the next one is not in a cache.
  const int64_t num_updates =
      std::max<int64_t>(1, kPoolBytes / (bytes_each * gradients_per_update));
  GradientBuffer buffer({sized.layout}, SparseDivisor::kGradientsPerUpdate);
  std::vector<ClosedStep> steps;
  std::vector<Block> blocks;
  for (int64_t u = 0; u < num_updates; ++u) {
    ClosedStep step{u, {}, {}, gradients_per_update};
    for (int64_t m = 0; m < gradients_per_update; ++m) {
      blocks.push_back(Pack(sized, &random));
      step.ids.push_back(u * gradients_per_update + m);
      step.weights.push_back(1.0f);
      Require(buffer.Push(step.ids.back(), blocks.back()));
    }
    steps.push_back(step);
  }
  const int64_t bytes_read = num_updates * gradients_per_update * bytes_each;

  std::shared_ptr<char> copy = Allocate(blocks.size() * blocks[0].num_bytes);
  const int64_t num_occurrences = gradients_per_update * c.num_ids;
  const int64_t max_rows =
      c.layout.merge_rows ? std::min(c.layout.num_rows, num_occurrences) : num_occurrences;
  std::shared_ptr<char> ids = Allocate(static_cast<size_t>(max_rows) * 8 + 64);
  std::shared_ptr<char> values =
      Allocate(c.layout.sparse ? static_cast<size_t>(max_rows * c.layout.row_width) * 8 + 64
                               : static_cast<size_t>(bytes_each) + 64);

  std::vector<double> ours, prepare, copying;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    double prepare_seconds = 0, write_seconds = 0;
    for (const ClosedStep& step : steps) {
      PreparedUpdate update;
      prepare_seconds += Seconds([&] { Require(buffer.Prepare(step, &update)); });
      write_seconds += Seconds([&] {
        if (c.layout.sparse) {
          update.WriteSparse(0, ids.get(), values.get());
        } else {
          update.WriteDense(0, values.get());
        }
      });
    }
    prepare.push_back(prepare_seconds);
    ours.push_back(prepare_seconds + write_seconds);
    copying.push_back(Seconds([&] {
      char* to = copy.get();
      for (const Block& block : blocks) {
        std::memcpy(to, block.data, block.num_bytes);
        to += block.num_bytes;
      }
    }));
  }
  const auto bytes = static_cast<double>(bytes_read);
  const double our_rate = bytes / Median(ours) / 1e9;
  const double copy_bytes = static_cast<double>(blocks.size() * blocks[0].num_bytes);
  const double copy_rate = copy_bytes / Median(copying) / 1e9;
  std::printf("%-28s %5lld %10.2f %12.2f %7.2f %12.0f %%\n", c.name,
              static_cast<long long>(gradients_per_update), our_rate, copy_rate,
              our_rate / copy_rate, 100 * Median(prepare) / Median(ours));
  std::fflush(stdout);
}

VariableLayout Dense(ValueType type) {
  VariableLayout layout;
  layout.value_type = type;
  return layout;
}

VariableLayout Sparse(ValueType type, bool merge_rows = true) {
  VariableLayout layout;
  layout.value_type = type;
  layout.sparse = true;
  layout.num_rows = 100000;
  layout.row_width = 16;
  layout.merge_rows = merge_rows;
  return layout;
}

}  // namespace
}  // namespace gba

int main() {
  using gba::ValueType;
  const gba::Case cases[] = {
      {"dense float32", gba::Dense(ValueType::kFloat32), 0},
      {"dense float64", gba::Dense(ValueType::kFloat64), 0},
      {"dense float16", gba::Dense(ValueType::kFloat16), 0},
      {"dense bfloat16", gba::Dense(ValueType::kBFloat16), 0},
      {"sparse float32 10k/100k x 16", gba::Sparse(ValueType::kFloat32), 10000},
      {"sparse float16 10k/100k x 16", gba::Sparse(ValueType::kFloat16), 10000},
      {"the same float32, kept apart", gba::Sparse(ValueType::kFloat32, false), 10000},
  };
  std::printf("%-28s %5s %10s %12s %7s %14s\n", "gradients", "M", "ours GB/s", "memcpy GB/s",
              "ratio", "of it Prepare");
  for (const gba::Case& c : cases) {
    for (int64_t gradients_per_update : {4, 32, 128}) gba::Run(c, gradients_per_update);
  }
  return 0;
}

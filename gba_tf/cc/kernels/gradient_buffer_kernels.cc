// [5] Tensors <-> gradient buffer.
#include <atomic>

#include "absl/strings/str_cat.h"
#include "gba_tf/cc/core/gradient_buffer.h"
#include "gba_tf/cc/core/packed_gradient.h"
#include "gba_tf/cc/kernels/layout.h"
#include "gba_tf/cc/kernels/resources.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/platform/errors.h"

namespace gba {
namespace {

using ::tensorflow::AsyncOpKernel;
using ::tensorflow::DataType;
using ::tensorflow::DEVICE_CPU;
using ::tensorflow::OpKernel;
using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;
using ::tensorflow::tstring;
using ::tensorflow::core::RefCountPtr;

// The bytes of `tensor`, which stays alive as long as the block does.
Block BlockOf(const Tensor& tensor) {
  auto owner = std::make_shared<Tensor>(tensor);
  return {owner->data(), owner->TotalBytes(), owner};
}

class GradientBufferOp : public OpKernel {
 public:
  explicit GradientBufferOp(OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("run_id", &run_id_));
    OP_REQUIRES_OK(c, c->GetAttr("shared_name", &shared_name_));
    OP_REQUIRES_OK(c, BufferLayoutFromAttributes(c, &layout_));
    std::string divisor;
    OP_REQUIRES_OK(c, c->GetAttr("sparse_divisor", &divisor));
    sparse_divisor_ = divisor == "gradients_with_row" ? SparseDivisor::kGradientsWithRow
                                                      : SparseDivisor::kGradientsPerUpdate;
  }

  void Compute(OpKernelContext* c) override {
    const std::string container = EnterRun(c->resource_manager(), run_id_);
    GradientBufferResource* found = nullptr;
    OP_REQUIRES_OK(c,
                   c->resource_manager()->LookupOrCreate<GradientBufferResource>(
                       container, shared_name_, &found, [this](GradientBufferResource** created) {
                         *created = new GradientBufferResource(layout_, sparse_divisor_);
                         return absl::OkStatus();
                       }));
    RefCountPtr<GradientBufferResource> resource(found);
    OP_REQUIRES(
        c, SameLayout(resource->layout(), layout_) && resource->sparse_divisor() == sparse_divisor_,
        tensorflow::errors::InvalidArgument(
            "Expected gradient buffer ", shared_name_, " for ", layout_.size(),
            " given variables, found one for other variables: ", resource->DebugString(),
            ". Use another shared_name."));
    Tensor* handle = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, TensorShape({}), &handle));
    handle->scalar<tensorflow::ResourceHandle>()() =
        tensorflow::MakeResourceHandle<GradientBufferResource>(c, container, shared_name_);
  }

 private:
  std::string run_id_;
  std::string shared_name_;
  std::vector<VariableLayout> layout_;
  SparseDivisor sparse_divisor_;
};
REGISTER_KERNEL_BUILDER(Name("GbaGradientBuffer").Device(DEVICE_CPU), GradientBufferOp);

class PackGradientOp : public OpKernel {
 public:
  explicit PackGradientOp(OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("num_rows", &num_rows_));
    OP_REQUIRES_OK(c, c->GetAttr("sparse", &sparse_));
    OP_REQUIRES_OK(c, c->GetAttr("merge_rows", &merge_rows_));
    std::vector<DataType> value_types, id_types;
    OP_REQUIRES_OK(c, c->GetAttr("value_types", &value_types));
    OP_REQUIRES_OK(c, c->GetAttr("id_types", &id_types));
    const size_t num_sparse = std::count(sparse_.begin(), sparse_.end(), true);
    OP_REQUIRES(c,
                num_rows_.size() == value_types.size() && sparse_.size() == value_types.size() &&
                    merge_rows_.size() == value_types.size() && id_types.size() == num_sparse,
                tensorflow::errors::InvalidArgument(
                    "Expected num_rows, sparse and merge_rows of ", value_types.size(),
                    " entries and one ids per sparse gradient, found num_rows ", num_rows_.size(),
                    ", sparse ", sparse_.size(), " with ", num_sparse, " true, merge_rows ",
                    merge_rows_.size(), ", ids ", id_types.size()));
  }

  void Compute(OpKernelContext* c) override {
    std::vector<VariableLayout> layout(sparse_.size());
    std::vector<GradientInput> gradients(sparse_.size());
    int ids_input = static_cast<int>(sparse_.size());
    for (size_t i = 0; i < sparse_.size(); ++i) {
      const Tensor& values = c->input(i);
      OP_REQUIRES_OK(c, ToValueType(values.dtype(), &layout[i].value_type));
      layout[i].sparse = sparse_[i];
      gradients[i].values = values.data();
      if (!sparse_[i]) {
        layout[i].num_elements = values.NumElements();
        continue;
      }
      const Tensor& ids = c->input(ids_input++);
      OP_REQUIRES_OK(c, ToIdType(ids.dtype(), &layout[i].id_type));
      OP_REQUIRES(c, ids.dims() == 1 && values.dims() >= 1 && values.dim_size(0) == ids.dim_size(0),
                  tensorflow::errors::InvalidArgument(
                      "Expected IndexedSlices with as many values as ids for variable ", i,
                      ", found values of shape ", values.shape().DebugString(),
                      " and ids of shape ", ids.shape().DebugString()));
      layout[i].merge_rows = merge_rows_[i];
      layout[i].num_rows = num_rows_[i];
      layout[i].row_width = 1;
      for (int d = 1; d < values.dims(); ++d) layout[i].row_width *= values.dim_size(d);
      gradients[i].ids = ids.data();
      gradients[i].num_ids = ids.NumElements();
    }
    GradientPacker packer;
    OP_REQUIRES_OK(c, ToAbsl(packer.Init(layout, std::move(gradients))));
    Tensor* block = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(
                          0, TensorShape({static_cast<int64_t>(packer.packed_bytes())}), &block));
    packer.Write(block->data());
  }

 private:
  std::vector<int64_t> num_rows_;
  std::vector<bool> sparse_;
  std::vector<bool> merge_rows_;
};
REGISTER_KERNEL_BUILDER(Name("GbaPackGradient").Device(DEVICE_CPU), PackGradientOp);

class PushGradientOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* c) override {
    RefCountPtr<GradientBufferResource> resource;
    OP_REQUIRES_OK(c, LookupGbaResource(c, 0, &resource));
    OP_REQUIRES(c, c->input(1).dims() == 0 && c->input(2).dims() == 1,
                tensorflow::errors::InvalidArgument(
                    "Expected a scalar token_id and a vector block, found shapes ",
                    c->input(1).shape().DebugString(), " and ", c->input(2).shape().DebugString()));
    OP_REQUIRES_OK(
        c, ToAbsl(resource->buffer().Push(c->input(1).scalar<int64_t>()(), BlockOf(c->input(2)))));
    c->set_output(0, c->input(1));
  }
};
REGISTER_KERNEL_BUILDER(Name("GbaPushGradient").Device(DEVICE_CPU), PushGradientOp);

class DropGradientsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* c) override {
    RefCountPtr<GradientBufferResource> resource;
    OP_REQUIRES_OK(c, LookupGbaResource(c, 0, &resource));
    const auto ids = c->input(1).flat<int64_t>();
    resource->buffer().Drop({ids.data(), ids.data() + ids.size()});
  }
};
REGISTER_KERNEL_BUILDER(Name("GbaDropGradients").Device(DEVICE_CPU), DropGradientsOp);

class BufferStatsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* c) override {
    RefCountPtr<GradientBufferResource> resource;
    OP_REQUIRES_OK(c, LookupGbaResource(c, 0, &resource));
    const BufferStats stats = resource->buffer().stats();
    Tensor* counts = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, TensorShape({3}), &counts));
    auto values = counts->vec<int64_t>();
    values(0) = stats.num_gradients;
    values(1) = stats.num_bytes;
    values(2) = resource->applied_steps();
  }
};
REGISTER_KERNEL_BUILDER(Name("GbaBufferStats").Device(DEVICE_CPU), BufferStatsOp);

class SerializeBufferOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* c) override {
    RefCountPtr<GradientBufferResource> resource;
    OP_REQUIRES_OK(c, LookupGbaResource(c, 0, &resource));
    const auto gradients = resource->buffer().Snapshot();
    const TensorShape shape({static_cast<int64_t>(gradients.size())});
    Tensor* ids = nullptr;
    Tensor* blocks = nullptr;
    Tensor* applied_steps = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, shape, &ids));
    OP_REQUIRES_OK(c, c->allocate_output(1, shape, &blocks));
    OP_REQUIRES_OK(c, c->allocate_output(2, TensorShape({}), &applied_steps));
    for (size_t i = 0; i < gradients.size(); ++i) {
      ids->vec<int64_t>()(i) = gradients[i].first;
      const Block& block = gradients[i].second;
      blocks->vec<tstring>()(i).assign(static_cast<const char*>(block.data), block.num_bytes);
    }
    applied_steps->scalar<int64_t>()() = resource->applied_steps();
  }
};
REGISTER_KERNEL_BUILDER(Name("GbaSerializeBuffer").Device(DEVICE_CPU), SerializeBufferOp);

// In a job of the resource's queue, so that no update sees half of the old timeline.
class RestoreBufferOp : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(OpKernelContext* c, DoneCallback done) override {
    RefCountPtr<GradientBufferResource> resource;
    OP_REQUIRES_OK_ASYNC(c, LookupGbaResource(c, 0, &resource), done);
    const Tensor& ids = c->input(1);
    const Tensor& blocks = c->input(2);
    const Tensor& applied_steps = c->input(3);
    OP_REQUIRES_ASYNC(
        c,
        ids.dims() == 1 && blocks.dims() == 1 && ids.NumElements() == blocks.NumElements() &&
            applied_steps.dims() == 0,
        tensorflow::errors::InvalidArgument(
            "Expected as many token_ids as blocks and a scalar applied_steps, found shapes ",
            ids.shape().DebugString(), ", ", blocks.shape().DebugString(), " and ",
            applied_steps.shape().DebugString()),
        done);
    std::vector<std::pair<TokenId, Block>> gradients;
    for (int64_t i = 0; i < ids.NumElements(); ++i) {
      auto bytes = std::make_shared<tstring>(blocks.vec<tstring>()(i));
      gradients.emplace_back(ids.vec<int64_t>()(i), Block{bytes->data(), bytes->size(), bytes});
    }
    // A job is copied, which a RefCountPtr cannot be.
    auto shared = std::make_shared<RefCountPtr<GradientBufferResource>>(std::move(resource));
    GradientBufferResource* buffer = shared->get();
    buffer->updates().Enqueue([c, shared = std::move(shared), gradients = std::move(gradients),
                               steps = applied_steps.scalar<int64_t>()(), done]() mutable {
      const absl::Status status = (*shared)->Restore(std::move(gradients), steps);
      if (!status.ok()) c->SetStatus(status);
      (*shared)->updates().Done(*c->runner());
      done();
    });
  }
};
REGISTER_KERNEL_BUILDER(Name("GbaRestoreBuffer").Device(DEVICE_CPU), RestoreBufferOp);

}  // namespace
}  // namespace gba

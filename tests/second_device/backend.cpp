// Collectives of the second device: gloo's, on the memory that its tensors have.
#include <torch/extension.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "device.h"

namespace {

using Tensors = std::vector<at::Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;

at::Tensor hosted(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.device().type() == c10::DeviceType::PrivateUse1, "a tensor on ", tensor.device());
  return second_device::alias(tensor);
}

Tensors hosted(const Tensors& tensors) {
  Tensors aliases;
  for (const auto& tensor : tensors) aliases.push_back(hosted(tensor));
  return aliases;
}

std::vector<Tensors> hosted(const std::vector<Tensors>& lists) {
  std::vector<Tensors> aliases;
  for (const auto& tensors : lists) aliases.push_back(hosted(tensors));
  return aliases;
}

struct Done final : c10d::Work {  // gloo's may write their results anew in each wait
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
};

class Aliasing final : public c10d::Backend {
 public:
  explicit Aliasing(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "accel"; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto aliases = hosted(tensors);
    return gloo_->broadcast(aliases, options);
  }
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return reduced(tensors, options, [this, aliases = hosted(tensors)](const auto& with) mutable {
      return gloo_->allreduce(aliases, with);
    });
  }
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return reduced(tensors, options, [this, aliases = hosted(tensors)](const auto& with) mutable {
      return gloo_->allreduce_coalesced(aliases, with);
    });
  }
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return reduced(tensors, options, [this, aliases = hosted(tensors)](const auto& with) mutable {
      return gloo_->reduce(aliases, with);
    });
  }
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = hosted(outputs);
    auto from = hosted(inputs);
    return gloo_->allgather(to, from, options);
  }
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto to = hosted(output).view(-1), from = hosted(input).view(-1);  // NCCL counts elements, gloo compares shapes
    return gloo_->_allgather_base(to, from, options);
  }
  Work allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto to = hosted(outputs), from = hosted(inputs);
    return gloo_->allgather_into_tensor_coalesced(to, from, options);
  }
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto to = hosted(outputs);
    auto from = hosted(inputs);
    return gloo_->gather(to, from, options);
  }
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto to = hosted(outputs);
    auto from = hosted(inputs);
    return gloo_->scatter(to, from, options);
  }
  Work reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    return reduced(outputs, options, [this, to = hosted(outputs), from = hosted(inputs)](const auto& with) mutable {
      return gloo_->reduce_scatter(to, from, with);
    });
  }
  Work _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto to = hosted(output).view(-1), from = hosted(input).view(-1);
    return reduced({output}, options, [this, to, from](const auto& with) mutable {
      return gloo_->_reduce_scatter_base(to, from, with);
    });
  }
  Work reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    return reduced(outputs, options, [this, to = hosted(outputs), from = hosted(inputs)](const auto& with) mutable {
      return gloo_->reduce_scatter_tensor_coalesced(to, from, with);
    });
  }
  Work alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto to = hosted(output), from = hosted(input);
    return gloo_->alltoall_base(to, from, output_sizes, input_sizes, options);
  }
  Work send(Tensors& tensors, int rank, int tag) override {
    auto aliases = hosted(tensors);
    return gloo_->send(aliases, rank, tag);
  }
  Work recv(Tensors& tensors, int rank, int tag) override {
    auto aliases = hosted(tensors);
    return gloo_->recv(aliases, rank, tag);
  }
  Work barrier(const c10d::BarrierOptions& options) override { return gloo_->barrier(options); }

 private:
  // gloo has no averages, which NCCL has: they are sums that are divided here, before this returns.
  template <typename Options, typename Reduction>
  Work reduced(const Tensors& outputs, const Options& options, Reduction reduction) {
    if (options.reduceOp != c10d::ReduceOp::AVG) return reduction(options);
    auto sum = options;
    sum.reduceOp = c10d::ReduceOp::SUM;
    reduction(sum)->wait();
    at::NoGradGuard guard;
    for (const auto& output : outputs) {
      if (at::isIntegralType(output.scalar_type(), /*includeBool=*/false))
        hosted(output).floor_divide_(getSize());
      else
        hosted(output).div_(getSize());
    }
    return c10::make_intrusive<Done>();
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

void second_device::define_backend(pybind11::module& module) {
  module.def("backend_of", [](const c10::intrusive_ptr<c10d::Backend>& gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Aliasing>(gloo);
  });
}

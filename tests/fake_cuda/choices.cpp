// What a build of torch for CUDA chooses that one for CPUs does not: kernels of attention, cuDNN's operators.
// No kernel is here: the operators run on fake tensors.

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/RNN.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  c10::Device getDevice() const override { return {type(), 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, {c10::kCUDA, 0}); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return 91000; }
  long versionRuntimeCuDNN() const override { return 91000; }
  double batchnormMinEpsilonCuDNN() const override { return 0.0; }
  bool supportsBFloat16RNNWithCuDNN() const override { return true; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

using at::Tensor;

// The order of torch's own choice on recent GPUs; nobody's shapes are looked at.
int64_t attention(const Tensor& query, const Tensor&, const Tensor&, const std::optional<Tensor>& mask, double, bool,
                  std::optional<double>, bool enable_gqa) {
  const auto& context = at::globalContext();
  const bool is_short = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  auto choice = sdp::SDPBackend::math;
  if (!enable_gqa && context.userEnabledMemEfficientSDP()) choice = sdp::SDPBackend::efficient_attention;
  if (is_short && !(mask && mask->requires_grad()) && context.userEnabledCuDNNSDP()) choice = sdp::SDPBackend::cudnn_attention;
  if (is_short && !mask && context.userEnabledFlashSDP()) choice = sdp::SDPBackend::flash_attention;
  return static_cast<int64_t>(choice);
}

std::tuple<Tensor, Tensor, Tensor> recurrent(const Tensor& input, const Tensor& hidden, const std::optional<Tensor>& cell,
                                             at::TensorList weights, int64_t mode, bool has_biases, int64_t num_layers,
                                             double dropout, bool train, bool bidirectional, bool batch_first) {
  std::optional<Tensor> state;
  if (dropout > 0 && train) state = at::empty({1}, input.options().dtype(at::kByte));
  auto [output, h, c, reserve, buffer] =
      at::_cudnn_rnn(input, weights, has_biases ? 4 : 2, at::empty({1}, input.options()), hidden, cell, mode, hidden.size(2), 0, num_layers, batch_first,
                     dropout, train, bidirectional, {}, state);
  return {output, h, c};
}

void lstm(Tensor& output, Tensor& hidden, Tensor& cell, const Tensor& input, at::TensorList hx, at::TensorList weights,
          bool has_biases, int64_t num_layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  std::tie(output, hidden, cell) = recurrent(
      input, hx[0], hx[1], weights, 2, has_biases, num_layers, dropout, train, bidirectional, batch_first);
}

template <int64_t mode>
void without_cell(Tensor& output, Tensor& hidden, const Tensor& input, const Tensor& hx, at::TensorList weights,
                  bool has_biases, int64_t num_layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  Tensor cell;
  std::tie(output, hidden, cell) = recurrent(
      input, hx, std::nullopt, weights, mode, has_biases, num_layers, dropout, train, bidirectional, batch_first);
}

std::tuple<Tensor, Tensor> rms_norm(const Tensor&, at::IntArrayRef, const std::optional<Tensor>&, std::optional<double>) {
  TORCH_CHECK(false, "runs on fake tensors alone");
}

}  // namespace

// In place of torch's own, which find no CUDA; the library is loaded before those of torch.
namespace at {
namespace accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return kCUDA; }
}  // namespace accelerator

namespace detail {
const CUDAHooksInterface& getCUDAHooks() {
  static const auto* hooks = new Hooks();
  return *hooks;
}
}  // namespace detail
}  // namespace at

namespace at::native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &::attention)
REGISTER_CUDA_DISPATCH(lstm_cudnn_stub, &::lstm)
REGISTER_CUDA_DISPATCH(gru_cudnn_stub, &::without_cell<3>)
REGISTER_CUDA_DISPATCH(rnn_tanh_cudnn_stub, &::without_cell<1>)
REGISTER_CUDA_DISPATCH(rnn_relu_cudnn_stub, &::without_cell<0>)
}  // namespace at::native

TORCH_LIBRARY_IMPL(aten, CUDA, library) { library.impl("_fused_rms_norm", rms_norm); }

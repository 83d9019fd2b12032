// A second device type whose memory is the host's: its tensors can't be mixed with those of CPUs, or of another index.
//
// It has an allocator that counts bytes, streams and events that need not wait, a random generator per index, autograd
// threads and autocast, as an accelerator has them. Operators run as CPUs run them, on the same memory, and their
// results are copied to the device. Views and sizes are changed by torch's own code.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/resize_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

#include "device.h"

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;
using Clock = std::chrono::steady_clock;

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 4;
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

thread_local DeviceIndex current = 0;
thread_local std::array<StreamId, kDevices> streams{};
std::atomic<StreamId> last_stream{0};

struct OnDevice {  // makes an index the current one for a while
  DeviceIndex before = current;
  explicit OnDevice(Device device) {
    if (device.has_index()) current = device.index();
  }
  ~OnDevice() { current = before; }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  Device exchangeDevice(Device device) const override {
    Device before(kDevice, current);
    current = device.index();
    return before;
  }
  Device getDevice() const override { return {kDevice, current}; }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Stream getStream(Device device) const override {
    return Stream(Stream::UNSAFE, device, streams[device.has_index() ? device.index() : current]);
  }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return Stream(Stream::UNSAFE, device, ++last_stream); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::UNSAFE, device, ++last_stream); }
  Stream exchangeStream(Stream stream) const override {
    const auto before = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return before;
  }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Clock::time_point;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    auto moment = [](void* event) { return *static_cast<Clock::time_point*>(event); };
    return std::chrono::duration<double, std::milli>(moment(end) - moment(start)).count();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Blocks of memory by their address, with their bytes.
class Blocks {
 public:
  void* allocate(size_t bytes) {
    if (bytes == 0) return nullptr;
    void* address = c10::alloc_cpu(bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    bytes_[address] = bytes;
    live_ += bytes;
    peak_ = std::max(peak_, live_);
    return address;
  }
  void free(void* address) {
    if (address == nullptr) return;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      live_ -= bytes_.at(address);
      bytes_.erase(address);
    }
    c10::free_cpu(address);
  }
  bool has(const void* address) {
    std::lock_guard<std::mutex> lock(mutex_);
    return bytes_.count(const_cast<void*>(address)) > 0;
  }
  size_t live() { return live_; }
  size_t peak() { return peak_; }
  void reset_peak() { peak_ = live_; }

 private:
  std::mutex mutex_;
  std::unordered_map<void*, size_t> bytes_;
  size_t live_ = 0, peak_ = 0;
};
std::array<std::atomic<size_t>, kDevices> allocations{};  // by index
Blocks& on_device = *new Blocks;  // both outlive the tensors that end with the process
Blocks& pinned = *new Blocks;

struct DeviceAllocator final : c10::Allocator {
  static void release(void* address) { on_device.free(address); }
  c10::DataPtr allocate(size_t bytes) override {
    void* address = on_device.allocate(bytes);
    allocations[current] += bytes > 0;
    return {address, address, &release, Device(kDevice, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kDevice, &device_allocator);

struct PinnedAllocator final : c10::Allocator {
  static void release(void* address) { pinned.free(address); }
  c10::DataPtr allocate(size_t bytes) override {
    void* address = pinned.allocate(bytes);
    return {address, address, &release, Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
};
PinnedAllocator pinned_allocator;

// A generator that draws as one of CPUs does.
struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator inner = at::detail::createCPUGenerator();
  explicit DeviceGenerator(DeviceIndex index) : c10::GeneratorImpl(Device(kDevice, index), kKeys) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.unsafeGetGeneratorImpl()->seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device_.index());
    copy->inner = inner.clone();
    return copy;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { return std::exchange(current, index); }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return std::exchange(current, index < 0 ? current : index);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    static auto& generators = *new std::array<at::Generator, kDevices>;
    auto& generator = generators[index < 0 ? current : index];
    if (!generator.defined()) generator = getNewGenerator(index);
    return generator;
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? current : index);
  }
  Device getDeviceFromPtr(void*) const override { return {kDevice, current}; }
  bool isPinnedPtr(const void* address) const override { return pinned.has(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    OnDevice guard(storage.device());
    auto fresh = device_allocator.allocate(bytes);
    if (const auto kept = std::min(bytes, storage.nbytes())) std::memcpy(fresh.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

bool is_ours(const at::Tensor& tensor) { return tensor.device().type() == kDevice; }

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, c10::ScalarType dtype, Device device) {
  OnDevice guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator, kKeys, dtype);
}

at::Tensor on_host(const at::Tensor& tensor) { return is_ours(tensor) ? second_device::alias(tensor) : tensor; }

at::Tensor copied_to_device(const at::Tensor& tensor, Device device) {
  auto made = empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), device);
  at::AutoDispatchBelowADInplaceOrView below;
  second_device::alias(made).copy_(tensor);
  return made;
}

// The arguments of an operator as CPUs take them, and its results as the device has them.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(*stack) {}

  void run() {
    const auto num_arguments = op_.schema().arguments().size();
    const auto first = stack_.size() - num_arguments;
    for (size_t i = 0; i < num_arguments; i++) stack_[first + i] = argument(stack_[first + i], op_.schema().arguments()[i].is_out());
    TORCH_CHECK(
        may_mix() || !is_mixed_, "Expected all tensors to be on the same device, but found at least two devices in ",
        op_.schema().name());
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
    for (auto& [tensor, host] : seen_) {
      const bool is_resized = host.sizes() != tensor.sizes();
      if (!is_resized && (host.numel() == 0 || host.data_ptr() == tensor.data_ptr())) continue;
      if (is_resized) tensor.resize_(host.sizes());
      at::AutoDispatchBelowADInplaceOrView below;
      second_device::alias(tensor).copy_(host);
    }
    const auto num_results = op_.schema().returns().size();
    for (size_t i = stack_.size() - num_results; i < stack_.size(); i++) stack_[i] = result(stack_[i]);
  }

 private:
  c10::IValue argument(const c10::IValue& value, bool is_out) {
    if (value.isTensor()) return hosted(value.toTensor(), is_out);
    if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorList()) tensors.push_back(hosted(tensor));
      return tensors;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList())
        tensors.push_back(tensor ? std::optional(hosted(*tensor)) : tensor);
      return tensors;
    }
    if (value.isDevice() && value.toDevice().type() == kDevice) {
      if (!device_) device_ = value.toDevice().has_index() ? value.toDevice() : Device(kDevice, current);
      return Device(at::kCPU);
    }
    if (value.isGenerator() && value.toGenerator().device().type() == kDevice)
      return value.toGenerator().get<DeviceGenerator>()->inner;
    return value;
  }

  // An output, and what is empty, gets memory of its own, which the operator may resize.
  at::Tensor hosted(const at::Tensor& tensor, bool is_out = false) {
    if (!tensor.defined()) return tensor;
    if (!is_ours(tensor)) {  // numbers may come from CPUs
      if (tensor.is_cpu() && tensor.dim() > 0) (device_ ? is_mixed_ : has_host_) = true;
      return tensor;
    }
    is_mixed_ |= has_host_ || (device_ && *device_ != tensor.device() && tensor.dim() > 0);
    if (!device_) device_ = tensor.device();
    auto host = tensor.numel() && !is_out ? second_device::alias(tensor) : at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
    seen_.emplace_back(tensor, host);
    return host;
  }

  c10::IValue result(const c10::IValue& value) {
    if (value.isTensor()) return returned(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorList()) tensors.push_back(returned(tensor));
    return tensors;
  }

  at::Tensor returned(const at::Tensor& tensor) {
    if (!tensor.defined() || !device_ || !tensor.is_cpu()) return tensor;
    for (const auto& [ours, host] : seen_)
      if (host.is_same(tensor)) return ours;
    return copied_to_device(tensor, *device_);
  }

  bool may_mix() const {
    static const std::set<std::string> names{
        "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_foreach_copy_"};
    return names.count(op_.schema().name()) > 0;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  std::vector<std::pair<at::Tensor, at::Tensor>> seen_;
  std::optional<Device> device_;
  bool has_host_ = false, is_mixed_ = false;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

at::Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice guard(device.value_or(Device(kDevice)));
  return at::detail::empty_generic(sizes, &device_allocator, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor new_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  return empty_strided(sizes, strides, c10::dtype_or_default(dtype), device.value_or(Device(kDevice)));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  at::AutoDispatchBelowADInplaceOrView below;
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) { return second_device::alias(tensor).item(); }

// What torch calls for convolutions on devices that it does not know.
at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  std::optional<at::Tensor> bias_on_host;
  if (bias.has_value() && bias->defined()) bias_on_host = on_host(*bias);
  const auto output = at::convolution(
      on_host(input), on_host(weight), bias_on_host, stride, padding, dilation, transposed, output_padding, groups);
  return copied_to_device(output, input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> wanted) {
  const int64_t num_channels = transposed ? weight.size(1) * groups : weight.size(0);
  const auto [of_input, of_weight, of_bias] = at::convolution_backward(
      on_host(gradient), on_host(input), on_host(weight), at::IntArrayRef{num_channels}, stride, padding, dilation,
      transposed, output_padding, groups, wanted);
  const auto moved = [&](const at::Tensor& made) {
    return made.defined() ? copied_to_device(made, input.device()) : made;
  };
  return {moved(of_input), moved(of_weight), moved(of_bias)};
}

const at::Tensor& resize(const at::Tensor& tensor, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  return at::cpu::resize_(tensor, sizes, format);
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage) {
  const auto size = static_cast<int64_t>(storage.nbytes() / tensor.dtype().itemsize());
  return at::cpu::set_(tensor, storage, 0, {size}, {1});
}

at::Tensor& set_view(
    at::Tensor& tensor, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::cpu::set_(tensor, storage, offset, sizes, strides);
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return at::cpu::set_(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

}  // namespace

namespace second_device {

at::Tensor alias(const at::Tensor& tensor) {
  void* data = tensor.numel() ? const_cast<void*>(tensor.const_data_ptr()) : nullptr;
  return at::for_blob(data, tensor.sizes())
      .strides(tensor.strides())
      .deleter([tensor](void*) {})
      .options(at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU))
      .make_tensor();
}

}  // namespace second_device

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", new_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
  library.impl("as_strided", at::cpu::as_strided);
  library.impl("view", at::cpu::view);
  library.impl("_reshape_alias", at::cpu::_reshape_alias);
  library.impl("unfold", at::cpu::unfold);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_view);
  library.impl("set_.source_Tensor", set_tensor);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

// The operators that autocast runs in 16 or 32 bits on GPUs.
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define IN_FP32_BY_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define PROMOTED(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(IN_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(IN_FP32_BY_DTYPE)
  AT_FORALL_PROMOTE(PROMOTED)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  module.def("device_count", [] { return static_cast<int>(kDevices); });
  module.def("current_device", [] { return static_cast<int>(current); });
  module.def("set_device", [](int index) { current = static_cast<DeviceIndex>(index); });
  module.def("default_generator", [](int index) {
    return at::detail::getPrivateUse1Hooks().getDefaultGenerator(static_cast<DeviceIndex>(index));
  });
  module.def("allocated_bytes", [] { return on_device.live(); });
  module.def("peak_bytes", [] { return on_device.peak(); });
  module.def("num_allocations", [](int index) { return allocations.at(index).load(); });
  module.def("reset_peak", [] { on_device.reset_peak(); });
  second_device::define_backend(module);
}

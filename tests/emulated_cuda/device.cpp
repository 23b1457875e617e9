// A CUDA device that computes on the CPU, for a build of torch that has no CUDA.
//
// Tensors on it are real CUDA tensors to everybody who asks: `is_cuda` holds, operators are looked up
// under the CUDA key, autograd runs their backward on a thread of the device, and host and device do
// not mix. Their memory is the host's. A kernel is the CPU's kernel, called on tensors that alias the
// same memory. Streams and events exist and order nothing, because everything is done at once.

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <set>
#include <unordered_map>

// torch decides when it is built which accelerator it has. This library is loaded before torch, so that
// its answer is found first.
namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) {
  return c10::DeviceType::CUDA;
}
} // namespace at::accelerator

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

thread_local DeviceIndex current = 0;
std::atomic<int64_t> streams{1};

DeviceIndex count() {
  const char* text = std::getenv("EMULATED_GPUS");
  return text ? static_cast<DeviceIndex>(std::atoi(text)) : 1;
}

// ---- memory

std::atomic<int64_t> held{0}, most{0};

struct Block {
  void* start;
  int64_t bytes;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  held -= block->bytes;
  std::free(block->start);
  delete block;
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* start = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    held += bytes;
    most = std::max(most.load(), held.load());
    auto* block = new Block{start, static_cast<int64_t>(bytes)};
    return {start, block, &release, Device(DeviceType::CUDA, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

DeviceMemory device_memory;
const bool registered = [] {
  c10::SetAllocator(DeviceType::CUDA, &device_memory, 100);
  return true;
}();

// Memory of the host that is page-locked on a machine with CUDA.
std::mutex pinned_lock;
std::set<const void*> pinned;

void unpin(void* context) {
  std::lock_guard<std::mutex> hold(pinned_lock);
  pinned.erase(context);
  std::free(context);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* start = std::aligned_alloc(64, (bytes + 64) / 64 * 64);
    std::lock_guard<std::mutex> hold(pinned_lock);
    pinned.insert(start);
    return {start, start, &unpin, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &unpin;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

PinnedMemory pinned_memory;

// ---- devices, streams and events

double now() {
  return std::chrono::duration<double, std::milli>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override {
    return DeviceType::CUDA;
  }
  Device exchangeDevice(Device device) const override {
    Device before(DeviceType::CUDA, current);
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return {DeviceType::CUDA, current};
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < count(), "CUDA error: invalid device ordinal");
    if (device.has_index())
      current = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index())
      current = device.index();
  }
  c10::Stream getStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : getDevice());
  }
  c10::Stream getDefaultStream(Device device) const override {
    return getStream(device);
  }
  c10::Stream getNewStream(Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, streams++);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return getStream(stream.device());
  }
  DeviceIndex deviceCount() const noexcept override {
    return count();
  }
  void record(void** event, const c10::Stream&, const DeviceIndex, const c10::EventFlag)
      const override {
    if (!*event)
      *event = new double;
    *static_cast<double*>(*event) = now();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<double*>(event);
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    return *static_cast<double*>(end) - *static_cast<double*>(start);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  bool queryStream(const c10::Stream&) const override {
    return true;
  }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex deviceCount() const override {
    return count();
  }
  int getNumGPUs() const override {
    return count();
  }
  DeviceIndex current_device() const override {
    return current;
  }
  DeviceIndex getCurrentDevice() const override {
    return current;
  }
  bool isPinnedPtr(const void* start) const override {
    std::lock_guard<std::mutex> hold(pinned_lock);
    return pinned.count(start) > 0;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &pinned_memory;
  }
  c10::Allocator* getCUDADeviceAllocator() const override {
    return &device_memory;
  }
  Device getDeviceFromPtr(void*) const override {
    return {DeviceType::CUDA, current};
  }
  void deviceSynchronize(DeviceIndex) const override {}
};

const Hooks hooks{{}};

// ---- kernels

// A storage of one kind of device over the memory of another's, which it keeps alive.
c10::Storage storage_over(const c10::Storage& other, Device device) {
  auto* keep = new c10::Storage(other);
  c10::DataPtr data(
      other.mutable_data(), keep, [](void* kept) { delete static_cast<c10::Storage*>(kept); }, device);
  return c10::Storage(
      c10::Storage::use_byte_size_t(), other.nbytes(), std::move(data), c10::GetAllocator(device.type()), true);
}

at::Tensor tensor_over(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj())
    made._set_conj(true);
  if (like.is_neg())
    made._set_neg(true);
  return made;
}

// The arguments of one call, as tensors of the CPU.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& given) {
    if (!given.defined() || !given.is_cuda()) {
      if (given.defined() && given.device().is_cpu() && given.dim() > 0)
        host_ = true;
      return given;
    }
    where_ = given.device();
    device_ = true;
    auto* whole = given.storage().unsafeGetStorageImpl();
    auto found = storages_.find(whole);
    if (found == storages_.end()) {
      auto own = storage_over(given.storage(), Device(DeviceType::CPU));
      found = storages_.emplace(whole, std::make_pair(given.storage(), own)).first;
    }
    auto alias = tensor_over(given, found->second.second, c10::DispatchKey::CPU);
    tensors_.emplace(alias.unsafeGetTensorImpl(), std::make_pair(alias, given));
    return alias;
  }

  // A result of the CPU's kernel, as a tensor of the device: an argument, a view of one, or new.
  at::Tensor back(const at::Tensor& result) {
    if (!result.defined() || !result.device().is_cpu())
      return result;
    auto argument = tensors_.find(result.unsafeGetTensorImpl());
    if (argument != tensors_.end())
      return argument->second.second;
    for (auto& [whole, pair] : storages_)
      if (pair.second.unsafeGetStorageImpl() == result.storage().unsafeGetStorageImpl())
        return tensor_over(result, pair.first, c10::DispatchKey::CUDA);
    return tensor_over(result, storage_over(result.storage(), where_), c10::DispatchKey::CUDA);
  }

  // Arguments that the kernel has resized, or given another memory.
  void settle() {
    for (auto& [whole, pair] : storages_) {
      auto& [given, own] = pair;
      if (own.mutable_data() == given.mutable_data() && own.nbytes() == given.nbytes())
        continue;
      auto replaced = storage_over(own, where_);
      given.unsafeGetStorageImpl()->set_data_ptr(replaced.unsafeGetStorageImpl()->set_data_ptr(
          c10::DataPtr(nullptr, where_)));
      given.unsafeGetStorageImpl()->set_nbytes(own.nbytes());
    }
    for (auto& [impl, pair] : tensors_) {
      auto& [alias, given] = pair;
      if (alias.sizes() != given.sizes() || alias.strides() != given.strides())
        given.unsafeGetTensorImpl()->set_sizes_and_strides(
            alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }

  void name_device(Device device) {
    where_ = device.has_index() ? device : Device(DeviceType::CUDA, current);
  }

  bool mixed() const {
    return host_ && device_;
  }

 private:
  Device where_{DeviceType::CUDA, current};
  bool host_ = false, device_ = false;
  std::unordered_map<c10::StorageImpl*, std::pair<c10::Storage, c10::Storage>> storages_;
  std::unordered_map<c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>> tensors_;
};

template <typename Change>
c10::IValue changed(const c10::IValue& value, Change change) {
  if (value.isTensor())
    return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector())
      list.push_back(change(each));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
      list.push_back(each ? std::optional<at::Tensor>(change(*each)) : std::nullopt);
    return list;
  }
  return value;
}

// Operators whose tensors may lie on the host and on the device.
const std::set<std::string> CROSS = {
    "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::index.Tensor",
    "aten::index_put_", "aten::_index_put_impl_", "aten::index.Tensor_out",
    "aten::_foreach_copy_"};

// CUDA's context becomes current on a thread with its first kernel or copy. cuBLAS needs one.
thread_local bool has_context = false;

const std::set<std::string> MATMULS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};

void look_at_context(const c10::OperatorHandle& op) {
  const auto& returned = op.schema().returns();
  const bool view = !returned.empty() && returned[0].alias_info() && !returned[0].alias_info()->isWrite();
  if (view)
    return;
  if (MATMULS.count(op.operator_name().name) && !has_context)
    TORCH_WARN("Attempting to run cuBLAS, but there was no current CUDA context!");
  has_context = true;
}

void on_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  look_at_context(op);
  const auto given = op.schema().arguments().size();
  const auto base = stack->size() - given;
  Aliases aliases;
  for (size_t i = base; i < stack->size(); ++i) {
    auto& value = (*stack)[i];
    if (value.isDevice() && value.toDevice().is_cuda()) {
      aliases.name_device(value.toDevice());
      value = Device(DeviceType::CPU);
    } else {
      value = changed(value, [&](const at::Tensor& x) { return aliases.of(x); });
    }
  }
  TORCH_CHECK(
      !aliases.mixed() || CROSS.count(toString(op.operator_name())),
      "Expected all tensors to be on the same device, but found at least two devices, cuda and cpu! (",
      toString(op.operator_name()), ")");
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  aliases.settle();
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i)
    (*stack)[i] = changed((*stack)[i], [&](const at::Tensor& x) { return aliases.back(x); });
}

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(DeviceType::CUDA)));
  return at::detail::empty_generic_symint(
      size, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
      dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(DeviceType::CUDA)));
  return at::detail::empty_strided_symint_generic(
      size, stride, &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
      dtype.value_or(at::kFloat));
}

void record_stream(at::Tensor&, at::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("record_stream", TORCH_FN(record_stream));
  // These have kernels for every device, which then ask for a loop of this one.
  for (const char* name : {"copy_"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

// The kernel of `scaled_dot_product_attention`, by torch's numbers: 0 is plain, 1 flash, 2 efficient.
int64_t attention_kernel(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor&, const std::optional<at::Tensor>& bias,
    double, bool, std::optional<double>, bool) {
  const bool half = q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16;
  if (half && !bias && q.size(-1) % 8 == 0)
    return 1;
  return q.scalar_type() == at::kDouble || q.size(1) != k.size(1) ? 0 : 2;
}

const bool chosen = [] {
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_kernel);
  return true;
}();

// ---- what the Python side needs

at::Tensor on_host(const at::Tensor& given) {
  return Aliases().of(given);
}

int64_t held_bytes(bool at_most) {
  return at_most ? most.load() : held.load();
}

void forget_most() {
  most = held.load();
}

void set_device(int64_t index) {
  Guard().setDevice(Device(DeviceType::CUDA, static_cast<DeviceIndex>(index)));
}

int64_t get_device() {
  return current;
}

TORCH_LIBRARY(emulated, library) {
  library.def("on_host(Tensor x) -> Tensor", TORCH_FN(on_host));
  library.def("held_bytes(bool most) -> int", TORCH_FN(held_bytes));
  library.def("forget_most() -> ()", TORCH_FN(forget_most));
  library.def("set_device(int index) -> ()", TORCH_FN(set_device));
  library.def("get_device() -> int", TORCH_FN(get_device));
}

} // namespace

namespace at::detail {
const CUDAHooksInterface& getCUDAHooks() {
  return hooks;
}
} // namespace at::detail

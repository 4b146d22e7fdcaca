// CUDA tensors over CPU memory: what torch asks of a device, answered by the CPU. No CUDA is needed to build or to run this.
//
// A fallback under the CUDA key shows every CUDA tensor of a call to the CPU's kernel as a CPU tensor on the same memory, and gives what
// comes back as CUDA tensors: an argument as itself, a view of one as a view, new memory as new memory. The rest are the parts that
// torch looks for by name: guard, allocators, hooks, DDP's timer, and operators that exist for CUDA alone.
//
// A torch that brings kernels for CUDA loads its own parts first (`libtorch_cuda` is linked to this, so it starts before): each of its
// kernels is overruled by the fallback, and each part by the one here.
#define AT_PER_OPERATOR_HEADERS
#include <ATen/core/Tensor.h>
#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/ops/add.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/chunk.h>
#include <ATen/ops/sum.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

using at::Device;
using at::DeviceIndex;
using at::Tensor;
using c10::DataPtr;
using c10::IValue;
using c10::Storage;
using c10::StorageImpl;
using torch::jit::Stack;

namespace {

constexpr auto kDevice = c10::DeviceType::CUDA;
std::atomic<int> device_count{1};
thread_local DeviceIndex here = 0;

// --- memory: the CPU's, counted ---

std::atomic<int64_t> allocated{0}, peak{0}, allocations{0};

struct Block {
  DataPtr inner;
  int64_t nbytes;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  allocated -= block->nbytes;
  delete block;
}

// The same memory as that of a CPU pointer, on the device and counted.
DataPtr counted(DataPtr inner, int64_t nbytes, Device device) {
  void* memory = inner.get();
  if (memory == nullptr) return DataPtr(nullptr, device);
  allocations++;
  int64_t now = allocated += nbytes, most = peak;
  while (now > most && !peak.compare_exchange_weak(most, now)) {
  }
  return DataPtr(memory, new Block{std::move(inner), nbytes}, &free_block, device);
}

struct DeviceAllocator final : c10::Allocator {
  DataPtr allocate(size_t n) override {
    return counted(c10::GetCPUAllocator()->allocate(n), static_cast<int64_t>(n), Device(kDevice, here));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};
DeviceAllocator device_allocator;

std::mutex pinned_lock;
std::map<const char*, size_t> pinned_ranges;

struct Pinned {
  DataPtr inner;
};
void free_pinned(void* context) {
  auto* pinned = static_cast<Pinned*>(context);
  {
    std::lock_guard<std::mutex> hold(pinned_lock);
    pinned_ranges.erase(static_cast<const char*>(pinned->inner.get()));
  }
  delete pinned;
}
struct PinnedAllocator final : c10::Allocator {
  DataPtr allocate(size_t n) override {
    DataPtr inner = c10::GetCPUAllocator()->allocate(n ? n : 1);
    void* memory = inner.get();
    std::lock_guard<std::mutex> hold(pinned_lock);
    pinned_ranges[static_cast<const char*>(memory)] = n ? n : 1;
    return DataPtr(memory, new Pinned{std::move(inner)}, &free_pinned, Device(c10::DeviceType::CPU));
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  std::lock_guard<std::mutex> hold(pinned_lock);
  auto after = pinned_ranges.upper_bound(static_cast<const char*>(data));
  if (after == pinned_ranges.begin()) return false;
  auto range = std::prev(after);
  return static_cast<const char*>(data) < range->first + range->second;
}

// --- tensors of one memory under two devices ---

const c10::DispatchKeySet kDeviceKeys(c10::DispatchKey::CUDA);
const c10::DispatchKeySet kHostKeys(c10::DispatchKey::CPU);

Tensor tensor_on(Storage storage, const Tensor& like, c10::DispatchKeySet keys) {
  Tensor found = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  auto* impl = found.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.is_conj()) impl->_set_conj(true);
  if (like.is_neg()) impl->_set_neg(true);
  return found;
}

void drop_storage(void* context) {
  c10::raw::intrusive_ptr::decref(static_cast<StorageImpl*>(context));
}

// A storage of the CPU on the memory of another one, which it keeps alive.
Storage same_memory(const Storage& of, Device device, c10::Allocator* allocator) {
  StorageImpl* impl = of.unsafeGetStorageImpl();
  c10::raw::intrusive_ptr::incref(impl);
  return Storage(Storage::use_byte_size_t(), impl->nbytes(), DataPtr(impl->mutable_data(), impl, &drop_storage, device), allocator, true);
}

bool on_device(const Tensor& t) { return t.defined() && t.device().type() == kDevice; }

// The arguments of one call, as the CPU sees them.
struct Shown {
  std::unordered_map<StorageImpl*, Storage> host_of;    // of the device's storage
  std::unordered_map<StorageImpl*, Storage> device_of;  // of the host's
  std::unordered_map<c10::TensorImpl*, std::pair<Tensor, Tensor>> original;  // what the CPU saw, and what it is
  std::unordered_set<StorageImpl*> theirs;  // of arguments that are on the CPU and stay there
  std::unordered_set<StorageImpl*> normal;  // of the host's that stand for arguments which are no inference tensors
  std::vector<std::pair<Storage, Storage>> pairs;
  Device device{kDevice, 0};
  bool known = false;

  Storage host(const Storage& storage) {
    auto found = host_of.find(storage.unsafeGetStorageImpl());
    if (found != host_of.end()) return found->second;
    Storage made = same_memory(storage, Device(c10::DeviceType::CPU), c10::GetCPUAllocator());
    host_of.emplace(storage.unsafeGetStorageImpl(), made);
    device_of.emplace(made.unsafeGetStorageImpl(), storage);
    pairs.emplace_back(storage, made);
    return made;
  }

  Tensor host(const Tensor& t) {
    if (!on_device(t)) {
      if (t.defined() && t.has_storage()) theirs.insert(t.storage().unsafeGetStorageImpl());
      return t;
    }
    if (!known || t.dim() > 0) device = t.device();
    known = true;
    Tensor made = tensor_on(host(t.storage()), t, kHostKeys);
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    original.emplace(made.unsafeGetTensorImpl(), std::make_pair(made, t));
    if (!t.is_inference()) normal.insert(made.storage().unsafeGetStorageImpl());
    return made;
  }

  Storage device_storage(const Storage& storage) {
    auto found = device_of.find(storage.unsafeGetStorageImpl());
    if (found != device_of.end()) return found->second;
    auto* impl = storage.unsafeGetStorageImpl();
    const auto nbytes = static_cast<int64_t>(impl->nbytes());
    DataPtr memory = storage.use_count() == 1 ? impl->set_data_ptr(DataPtr()) : same_memory(storage, device, nullptr).set_data_ptr(DataPtr());
    Storage made(Storage::use_byte_size_t(), nbytes, counted(std::move(memory), nbytes, device), &device_allocator, true);
    device_of.emplace(impl, made);
    return made;
  }

  Tensor back(const Tensor& t) {
    if (!t.defined() || t.device().type() != c10::DeviceType::CPU || t.layout() != c10::kStrided) return t;
    if (theirs.count(t.storage().unsafeGetStorageImpl())) return t;
    auto argument = original.find(t.unsafeGetTensorImpl());
    if (argument == original.end()) {
      // Also in inference mode, a view of a normal tensor is a normal tensor.
      std::optional<c10::InferenceMode> normal_mode;
      if (normal.count(t.storage().unsafeGetStorageImpl()) && c10::InferenceMode::is_enabled()) normal_mode.emplace(false);
      return tensor_on(device_storage(t.storage()), t, kDeviceKeys);
    }
    update(argument->second.second, t);
    return argument->second.second;
  }

  // What an operator did to its argument: another size, another storage.
  void update(const Tensor& mine, const Tensor& seen) {
    auto* impl = mine.unsafeGetTensorImpl();
    auto found = device_of.find(seen.storage().unsafeGetStorageImpl());
    if (found == device_of.end()) {
      impl->set_storage_keep_dtype(device_storage(seen.storage()));
    } else if (!mine.storage().is_alias_of(found->second)) {
      impl->set_storage_keep_dtype(found->second);
    }
    if (mine.sizes() != seen.sizes() || mine.strides() != seen.strides() || mine.storage_offset() != seen.storage_offset()) {
      impl->set_storage_offset(seen.storage_offset());
      impl->set_sizes_and_strides(seen.sizes(), seen.strides());
    }
  }

  // Storages that got new memory or another size, and arguments that changed though nobody returns them.
  void settle() {
    for (auto& [mine, seen] : pairs) {
      auto *to = mine.unsafeGetStorageImpl(), *from = seen.unsafeGetStorageImpl();
      if (to->data() == from->data() && to->nbytes() == from->nbytes()) continue;
      if (to->data() != from->data()) {
        const auto nbytes = static_cast<int64_t>(from->nbytes());
        to->set_data_ptr_noswap(counted(from->set_data_ptr(DataPtr()), nbytes, mine.device()));
      }
      to->set_nbytes(from->nbytes());
    }
  }
};

// A generator of the device. As a GPU's (Philox) its state is a seed and an offset, which each random operator moves on; the numbers are
// those of the CPU's engine, started anew from both.
struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(DeviceIndex index) : at::CPUGeneratorImpl(c10::default_rng_seed_val), index_(index) { name(true); }
  void name(bool as_device) {
    device_ = as_device ? Device(kDevice, index_) : Device(c10::DeviceType::CPU);
    key_set_ = as_device ? kDeviceKeys : kHostKeys;
  }
  void begin() {
    uint64_t mixed = seed_ + 0x9E3779B97F4A7C15ull * (offset_ / 4 + 1);  // splitmix64 (Steele et al., 2014)
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
    at::CPUGeneratorImpl::set_current_seed(mixed ^ (mixed >> 31));
    offset_ += 4;
    name(false);
  }
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    Tensor state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    std::memcpy(state.mutable_data_ptr(), &seed_, 8);
    std::memcpy(state.mutable_data_ptr<uint8_t>() + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(), "RNG state is wrong size");
    std::memcpy(&seed_, state.data(), 8);
    std::memcpy(&offset_, static_cast<const uint8_t*>(state.data()) + 8, 8);
  }
  DeviceGenerator* clone_impl() const override {
    auto* made = new DeviceGenerator(index_);
    made->seed_ = seed_, made->offset_ = offset_;
    return made;
  }
  DeviceIndex index_;
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

const at::Generator& default_generator(DeviceIndex index) {
  static std::mutex lock;
  static std::map<DeviceIndex, at::Generator> made;
  std::lock_guard<std::mutex> hold(lock);
  auto found = made.find(index);
  if (found == made.end()) found = made.emplace(index, at::make_generator<DeviceGenerator>(index)).first;
  return found->second;
}

// While a call of the CPU runs, its generator is one of the CPU.
struct HostGenerator {
  DeviceGenerator* generator = nullptr;
  at::Generator take(const at::Generator& given) {
    if (given.device().type() == kDevice && (generator = dynamic_cast<DeviceGenerator*>(given.unsafeGetGeneratorImpl()))) generator->begin();
    return given;
  }
  ~HostGenerator() {
    if (generator) generator->name(true);
  }
};

// Operators that take tensors of several devices on a GPU as well.
const std::unordered_set<std::string>& across_devices() {
  static const std::unordered_set<std::string> names = {
      "aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::index.Tensor", "aten::index_put_", "aten::index_put",
      "aten::_index_put_impl_", "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put", "aten::_foreach_copy_", "aten::set_",
      "aten::record_stream", "aten::_has_same_storage_numel", "aten::lift_fresh", "aten::_pad_packed_sequence",
      "aten::_pack_padded_sequence", "aten::repeat_interleave.Tensor", "aten::_embedding_bag", "aten::is_same_size", "aten::resize_as_",
      "aten::_nested_tensor_from_mask", "aten::ctc_loss", "aten::_ctc_loss.Tensor", "aten::_ctc_loss", "aten::equal_storage"};
  return names;
}

void check_one_device(const c10::FunctionSchema& schema, std::optional<Device>& first, const Tensor& t, bool& scalar_first) {
  if (!t.defined() || t.unsafeGetTensorImpl()->is_wrapped_number()) return;
  const bool scalar = t.dim() == 0 && t.device().type() == c10::DeviceType::CPU;
  if (!first || (scalar_first && !scalar)) {
    first = t.device();
    scalar_first = scalar;
  } else if (*first != t.device() && !scalar) {
    const auto name = c10::toString(schema.operator_name());
    if (across_devices().count(name) || across_devices().count(schema.name())) return;
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", first->str(), " and ", t.device().str(), "! (when checking arguments of ", name, ")");
  }
}

// Whether the host waits in this operator until its stream is idle: it reads a value, or copies between host and device. A copy that is
// not told to be asynchronous waits in both directions (copy_kernel_cuda in aten/src/ATen/native/cuda/Copy.cpp).
bool makes_host_wait(const c10::FunctionSchema& schema, const Stack& stack, size_t begin) {
  const auto& name = schema.name();
  if (name == "aten::copy_") {
    const IValue &to = stack[begin], &from = stack[begin + 1], &asynchronous = stack[begin + 2];
    return to.toTensor().device() != from.toTensor().device() && !asynchronous.toBool() && to.toTensor().numel() > 0;
  }
  return name == "aten::_local_scalar_dense" || name == "aten::nonzero" || name == "aten::masked_select" || name == "aten::equal" ||
         name == "aten::_unique2";
}
void log_host_wait();

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), begin = stack->size() - count;
  const bool host_waits = makes_host_wait(schema, *stack, begin);
  Shown shown;
  HostGenerator generator;
  std::optional<Device> first;
  bool scalar_first = false;
  for (size_t k = 0; k < count; k++) {
    IValue& value = (*stack)[begin + k];
    if (value.isTensor()) {
      check_one_device(schema, first, value.toTensor(), scalar_first);
      value = shown.host(value.toTensor());
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& t : tensors) {
        check_one_device(schema, first, t, scalar_first);
        t = shown.host(t);
      }
      value = c10::List<Tensor>(at::ArrayRef<Tensor>(tensors));
    } else if (value.isOptionalTensorList()) {
      auto tensors = value.toOptionalTensorVector();
      c10::List<std::optional<Tensor>> seen;
      for (auto& t : tensors) seen.push_back(t && t->defined() ? std::optional<Tensor>(shown.host(*t)) : std::nullopt);
      value = std::move(seen);
    } else if (value.isStorage()) {
      if (value.toStorage().device().type() == kDevice) value = shown.host(value.toStorage());
    } else if (value.isDevice()) {
      if (value.toDevice().type() == kDevice) {
        shown.device = value.toDevice().has_index() ? value.toDevice() : Device(kDevice, here);
        shown.known = true;
        value = Device(c10::DeviceType::CPU);
      }
    } else if (value.isGenerator()) {
      generator.take(value.toGenerator());
    } else if (value.isNone() && schema.arguments()[k].name() == "generator") {
      value = generator.take(default_generator(shown.known ? shown.device.index() : here));
    }
  }
  if (!shown.known) shown.device = Device(kDevice, here);
  op.redispatchBoxed(kHostKeys, stack);
  const size_t results = schema.returns().size(), from = stack->size() - results;
  shown.settle();
  for (size_t k = 0; k < results; k++) {
    IValue& value = (*stack)[from + k];
    if (value.isTensor()) {
      value = shown.back(value.toTensor());
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& t : tensors) t = shown.back(t);
      value = c10::List<Tensor>(at::ArrayRef<Tensor>(tensors));
    }
  }
  for (auto& [_, both] : shown.original) shown.update(both.second, both.first);
  if (host_waits) log_host_wait();
}

// --- what has no CPU kernel, or one by another name ---

Device index_of(std::optional<Device> device) {
  return device && device->has_index() ? *device : Device(kDevice, here);
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const Device on = index_of(device);
  const DeviceIndex before = std::exchange(here, on.index());
  Tensor found = at::detail::empty_generic(size, &device_allocator, kDeviceKeys, c10::dtype_or_default(dtype), format);
  here = before;
  return found;
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  const Device on = index_of(device);
  const DeviceIndex before = std::exchange(here, on.index());
  Tensor found = at::detail::empty_strided_generic(size, stride, &device_allocator, kDeviceKeys, c10::dtype_or_default(dtype));
  here = before;
  return found;
}

// torch marks these as zeros without memory; here they have some.
Tensor zeros(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  return at::zeros(size, at::TensorOptions().dtype(dtype).device(index_of(device)));
}

// The storage of a tensor gets so many bytes; what fits is kept, as cudaMalloc and a copy would.
void resize_storage(const Tensor& t, int64_t nbytes) {
  auto* impl = t.storage().unsafeGetStorageImpl();
  DataPtr memory = counted(c10::GetCPUAllocator()->allocate(nbytes), nbytes, t.device());
  if (nbytes > 0 && impl->nbytes() > 0) std::memcpy(memory.get(), impl->data(), std::min<size_t>(nbytes, impl->nbytes()));
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(nbytes);
}

void record_stream(Tensor&, c10::Stream) {}

Tensor as_cpu(const Tensor& t) {
  if (!on_device(t)) return t;
  return tensor_on(same_memory(t.storage(), Device(c10::DeviceType::CPU), c10::GetCPUAllocator()), t, kHostKeys);
}

Tensor to_device(const Tensor& t, Device device) {
  return on_device(t) ? t : tensor_on(same_memory(t.storage(), device, &device_allocator), t, kDeviceKeys);
}

// ``index``: of which device; -1 for the current one.
Tensor from_cpu(const Tensor& t, int64_t index) { return to_device(t, Device(kDevice, index < 0 ? here : static_cast<DeviceIndex>(index))); }

int64_t sdp_choice(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& mask, double dropout, bool,
                   std::optional<double>, bool gqa) {
  if (q.dim() != 4 || k.dim() != 4 || q.numel() == 0 || k.numel() == 0) return 0;
  const bool heads_fit = gqa ? k.size(1) == v.size(1) && q.size(1) % k.size(1) == 0 : q.size(1) == k.size(1);
  const bool flash = at::globalContext().userEnabledFlashSDP() && !(mask && mask->defined()) && dropout == 0.0 && q.size(-1) == v.size(-1) && heads_fit;
  return flash ? 1 : 0;  // SDPBackend: flash_attention, math
}

// Grouped queries: the CPU's kernel wants one head of keys for each head of queries.
Tensor with_heads_of(const Tensor& q, const Tensor& kv) {
  return kv.size(1) == q.size(1) ? kv : kv.repeat_interleave(q.size(1) / kv.size(1), 1);
}

// The gradient of such a copy: the sum over the queries of a group.
Tensor sum_of_groups(const Tensor& grad, const Tensor& kv) {
  return grad.size(1) == kv.size(1) ? grad : grad.unflatten(1, {kv.size(1), -1}).sum(2);
}

using Flash = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

Flash flash(const Tensor& q, const Tensor& k, const Tensor& v, double dropout, bool causal, bool, std::optional<double> scale) {
  auto [out, sums] = at::_scaled_dot_product_flash_attention_for_cpu(
      as_cpu(q), with_heads_of(q, as_cpu(k)), with_heads_of(q, as_cpu(v)), dropout, causal, std::nullopt, scale);
  Tensor seed = at::empty({2}, at::TensorOptions().dtype(at::kLong).device(q.device())), none = at::empty({}, at::TensorOptions().dtype(at::kLong).device(q.device()));
  return {to_device(out, q.device()), to_device(sums, q.device()), Tensor(), Tensor(), q.size(2), k.size(2), seed, none, at::empty({0}, q.options())};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& grad, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& sums, const Tensor&, const Tensor&,
    c10::SymInt, c10::SymInt, double dropout, bool causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      as_cpu(grad), as_cpu(q), with_heads_of(q, as_cpu(k)), with_heads_of(q, as_cpu(v)), as_cpu(out), as_cpu(sums), dropout, causal, std::nullopt, scale);
  return {to_device(dq, q.device()), to_device(sum_of_groups(dk, k), q.device()), to_device(sum_of_groups(dv, v), q.device())};
}

Tensor with_bias(const Tensor& gates, const std::optional<Tensor>& bias) { return bias && bias->defined() ? gates + *bias : gates; }

// The cell of Hochreiter and Schmidhuber with forget gates; the workspace holds the gates i, f, g, o after their activations.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& in, const Tensor& hidden, const Tensor& cx, const std::optional<Tensor>& b1,
                                             const std::optional<Tensor>& b2) {
  auto part = (with_bias(in, b1) + with_bias(hidden, b2)).chunk(4, 1);
  Tensor i = part[0].sigmoid(), f = part[1].sigmoid(), g = part[2].tanh(), o = part[3].sigmoid();
  Tensor cy = f * cx + i * g;
  return {o * cy.tanh(), cy, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const std::optional<Tensor>& grad_hy, const std::optional<Tensor>& grad_cy, const Tensor& cx,
                                                      const Tensor& cy, const Tensor& workspace, bool has_bias) {
  auto part = workspace.chunk(4, 1);
  const Tensor &i = part[0], &f = part[1], &g = part[2], &o = part[3];
  Tensor tanh_cy = cy.tanh();
  Tensor gh = grad_hy && grad_hy->defined() ? *grad_hy : at::zeros_like(cy);
  Tensor gc = gh * o * (1 - tanh_cy * tanh_cy);
  if (grad_cy && grad_cy->defined()) gc = gc + *grad_cy;
  Tensor gates = at::cat({gc * g * i * (1 - i), gc * cx * f * (1 - f), gc * i * (1 - g * g), gh * tanh_cy * o * (1 - o)}, 1);
  return {gates, gc * f, has_bias ? gates.sum(0) : Tensor()};
}

// The cell of Cho et al.; the workspace holds r, z, n, hx and the new gate's share of the hidden state.
std::tuple<Tensor, Tensor> gru_cell(const Tensor& in, const Tensor& hidden, const Tensor& hx, const std::optional<Tensor>& b1,
                                    const std::optional<Tensor>& b2) {
  auto a = with_bias(in, b1).chunk(3, 1), h = with_bias(hidden, b2).chunk(3, 1);
  Tensor r = (a[0] + h[0]).sigmoid(), z = (a[1] + h[1]).sigmoid(), n = (a[2] + r * h[2]).tanh();
  return {n + z * (hx - n), at::cat({r, z, n, hx, h[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad, const Tensor& workspace, bool has_bias) {
  auto part = workspace.chunk(5, 1);
  const Tensor &r = part[0], &z = part[1], &n = part[2], &hx = part[3], &hn = part[4];
  Tensor gn = grad * (1 - z) * (1 - n * n), gz = grad * (hx - n) * z * (1 - z), gr = gn * hn * r * (1 - r);
  Tensor in = at::cat({gr, gz, gn}, 1), hidden = at::cat({gr, gz, gn * r}, 1);
  return {in, hidden, grad * z, has_bias ? in.sum(0) : Tensor(), has_bias ? hidden.sum(0) : Tensor()};
}

// --- guard, streams, events ---

using Clock = std::chrono::steady_clock;
thread_local std::map<DeviceIndex, c10::StreamId> current_stream;
std::atomic<c10::StreamId> next_stream{1};

// The CPU has done all work when a call returns, so events and waits do nothing here. They are logged, because on a GPU
// they decide what overlaps. Python takes the log before each call (distsim_take_stream_log); its kinds of steps are those
// of `distsim.script_capture.cuda.stream_log`.
enum class StepKind : int64_t { kRecord, kBlock, kSyncEvent, kSyncStream, kSyncDevice };
struct StreamStep {
  int64_t kind, event, stream;
};
std::mutex stream_log_mutex;
std::vector<StreamStep> stream_log;
std::atomic<int64_t> stream_log_size{0};
std::atomic<int64_t> next_event{1};
struct RecordedEvent {
  Clock::time_point when;
  int64_t id;
};

void log_step(StepKind kind, int64_t event, c10::StreamId stream) {
  // Without a second stream, work is in order anyway; only the host can wait.
  if (next_stream == 1 && kind <= StepKind::kBlock) return;
  std::lock_guard<std::mutex> guard(stream_log_mutex);
  if (kind == StepKind::kSyncStream && !stream_log.empty()) {
    const auto& last = stream_log.back();
    if (last.kind == static_cast<int64_t>(kind) && last.stream == stream) return;
  }
  stream_log.push_back({static_cast<int64_t>(kind), event, stream});
  stream_log_size = static_cast<int64_t>(stream_log.size());
}

// Python's, to read the log at once: the line of the script is that of the wait.
std::atomic<void (*)()> on_host_wait{nullptr};

void log_host_wait() {
  auto found = current_stream.find(here);
  log_step(StepKind::kSyncStream, 0, found == current_stream.end() ? 0 : found->second);
  if (auto call = on_host_wait.load()) call();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  Device exchangeDevice(Device d) const override { return Device(kDevice, d.has_index() ? std::exchange(here, d.index()) : here); }
  Device getDevice() const override { return Device(kDevice, here); }
  void setDevice(Device d) const override {
    if (d.has_index()) here = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.has_index()) here = d.index();
  }
  c10::Stream getStream(Device d) const override {
    const Device on = d.has_index() ? d : getDevice();
    auto found = current_stream.find(on.index());
    return c10::Stream(c10::Stream::UNSAFE, on, found == current_stream.end() ? 0 : found->second);
  }
  c10::Stream getDefaultStream(Device d) const override { return c10::Stream(c10::Stream::UNSAFE, d.has_index() ? d : getDevice(), 0); }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(Device d, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, d.has_index() ? d : getDevice(), next_stream++);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    c10::Stream before = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream s) const override { return reinterpret_cast<void*>(s.id()); }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(device_count.load()); }
  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new RecordedEvent{Clock::now(), next_event++};
    auto* recorded = static_cast<RecordedEvent*>(*event);
    recorded->when = Clock::now();
    log_step(StepKind::kRecord, recorded->id, stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) log_step(StepKind::kBlock, static_cast<RecordedEvent*>(event)->id, stream.id());
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<RecordedEvent*>(event); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override { log_step(StepKind::kSyncStream, 0, stream.id()); }
  void synchronizeEvent(void* event) const override {
    if (event) log_step(StepKind::kSyncEvent, static_cast<RecordedEvent*>(event)->id, 0);
  }
  void synchronizeDevice(const DeviceIndex) const override { log_step(StepKind::kSyncDevice, 0, 0); }
  void recordDataPtrOnStream(const DataPtr&, const c10::Stream&) const override {}
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(static_cast<RecordedEvent*>(b)->when - static_cast<RecordedEvent*>(a)->when).count();
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct DeviceTimer final : c10d::Timer {
  explicit DeviceTimer(Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto a = getTimeRef(start), b = getTimeRef(end);
    return a < 0 || b < a ? std::nullopt : std::optional<int64_t>(b - a);
  }
};

}  // namespace

namespace c10d {
namespace {
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(TimerRegistry, c10::kCUDA, c10::REGISTRY_PREFERRED, DeviceTimer);
}
}  // namespace c10d

// torch asks its registry for a class of this name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index < 0 ? here : index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override { return at::make_generator<DeviceGenerator>(index < 0 ? here : index); }
  Device getDeviceFromPtr(void*) const override { return Device(kDevice, here); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return here; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count.load()); }
  void setCurrentDevice(DeviceIndex d) const override { here = d; }
  DeviceIndex getCurrentDevice() const override { return here; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(here, d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return d < 0 ? here : std::exchange(here, d); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  int getNumGPUs() const override { return device_count; }
  void deviceSynchronize(DeviceIndex) const override { log_step(StepKind::kSyncDevice, 0, 0); }
  std::string showConfig() const override { return "cuda tensors over CPU memory"; }
};
namespace at {
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks);
}

namespace {
struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// An operator that the CPU makes of others, while CUDA has it in one: of others here too, also for the gradient.
void composite(const c10::OperatorHandle& op, Stack* stack) { op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::AutogradCPU), stack); }

bool is_composite(const c10::OperatorHandle& op) {
  return op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) && !op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
}

// Of an operator's kernels the newest is called; torch warns of the first that is overruled. Must stand before the implementations below.
struct Overrule {
  static void put(const c10::OperatorName& name, c10::DispatchKey key, c10::KernelFunction kernel) {
    static auto* kept = new std::vector<c10::RegistrationHandleRAII>;  // an operator whose handle goes gets its old kernel back
    kept->push_back(c10::Dispatcher::singleton().registerImpl(name, key, std::move(kernel), std::nullopt, nullptr, "distsim"));
  }
  Overrule() {
    Silent silent;
    c10::WarningUtils::WarningHandlerGuard guard(&silent);
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNamesForDispatchKey(c10::DispatchKey::CUDA)) {
      auto op = dispatcher.findOp(name);
      if (op && is_composite(*op)) {
        put(name, c10::DispatchKey::AutogradCUDA, c10::KernelFunction::makeFromBoxedFunction<&composite>());
        put(name, c10::DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<&composite>());
      } else {
        put(name, c10::DispatchKey::CUDA, c10::KernelFunction::makeFromBoxedFunction<&fallback>());
      }
    }
  }
} overrule;
}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("record_stream", &record_stream);
  m.impl("_efficientzerotensor", &zeros);
  // composite operators that ask for a tensor's device and then call what only GPUs have
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  // torch would call the version with `out`, which then warns about the size of the result
  m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("smooth_l1_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("_scaled_dot_product_flash_attention", &flash);
  m.impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

TORCH_LIBRARY(distsim, m) {
  m.def("as_cpu(Tensor(a) self) -> Tensor(a)", &as_cpu);
  m.def("default_generator(int index) -> Generator?", [](int64_t index) { return default_generator(static_cast<DeviceIndex>(index)); });
  m.def("resize_storage(Tensor self, int nbytes) -> ()", &resize_storage);
  m.def("from_cpu(Tensor(a) self, int index=-1) -> Tensor(a)", &from_cpu);
}

namespace {
struct Start {
  Start() {
    c10::SetAllocator(kDevice, &device_allocator);
    at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&sdp_choice);
  }
} start;
}  // namespace

extern "C" {
void distsim_set_device_count(int count) { device_count = count; }
void distsim_set_device(int index) { here = static_cast<DeviceIndex>(index); }
int distsim_get_device() { return here; }
int64_t distsim_allocated() { return allocated; }
int64_t distsim_peak() { return peak; }
int64_t distsim_allocations() { return allocations; }
void distsim_reset_peak() { peak = allocated.load(); }
int64_t distsim_get_stream(int index) { return Guard().getStream(Device(kDevice, static_cast<DeviceIndex>(index))).id(); }
void distsim_set_stream(int index, int64_t id) { current_stream[static_cast<DeviceIndex>(index)] = id; }
void distsim_log_synchronize() { log_step(StepKind::kSyncDevice, 0, 0); }
void distsim_set_on_host_wait(void (*function)()) { on_host_wait = function; }
int64_t distsim_stream_log_size() { return stream_log_size; }
// The stream of this thread, where there is more than one; -1 otherwise.
int64_t distsim_current_stream() { return next_stream == 1 ? -1 : Guard().getStream(Device(kDevice, here)).id(); }
// Moves at most `limit` steps of three numbers each to `out`, oldest first; returns their number.
int64_t distsim_take_stream_log(int64_t* out, int64_t limit) {
  std::lock_guard<std::mutex> guard(stream_log_mutex);
  const auto count = std::min<int64_t>(limit, static_cast<int64_t>(stream_log.size()));
  for (int64_t i = 0; i < count; i++) {
    *out++ = stream_log[i].kind;
    *out++ = stream_log[i].event;
    *out++ = stream_log[i].stream;
  }
  stream_log.erase(stream_log.begin(), stream_log.begin() + count);
  stream_log_size = static_cast<int64_t>(stream_log.size());
  return count;
}
}

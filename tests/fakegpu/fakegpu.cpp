// A device of host memory, "fakegpu", that torch treats as an accelerator; what it imitates says __init__.py.
//
// One function, by_cpu, stands for all operators: it runs the kernel of the CPU on tensors of the CPU that are
// aliases of the same memory, and wraps what comes back. So nothing is copied, results have the bits of the
// CPU, and views and operators in place work by themselves. (torch's own cpu_fallback copies, loses strides,
// and takes tensors of two devices.) Operators that torch does not pass on have a function of their own.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>

namespace {

using at::Device, at::DeviceIndex, at::Generator, at::Storage, at::StorageImpl, at::Tensor, c10::IValue;

constexpr auto kFake = at::kPrivateUse1;
constexpr DeviceIndex kDevices = 2;  // so that cuda:0 and cuda:1 can be told apart
thread_local DeviceIndex current = 0;
std::atomic<bool> has_float64 = true;  // Apple's GPUs have none
std::set<std::string> lenient;         // operators that take numbers (0-dim tensors) of the CPU
std::map<std::string, int64_t> calls;  // how often each operator was called, and bytes copied
std::mutex mutex;  // of the counted calls

void count(const std::string& name, int64_t n = 1) {
    std::lock_guard<std::mutex> lock(mutex);
    calls[name] += n;
}

// ------------------------------------------------------------------------------------------ the device

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kFake> {
    Device exchangeDevice(Device device) const override {
        const Device before = getDevice();
        uncheckedSetDevice(device);
        return before;
    }
    Device getDevice() const override { return {kFake, current}; }
    void setDevice(Device device) const override { uncheckedSetDevice(device); }
    void uncheckedSetDevice(Device device) const noexcept override {
        if (device.has_index()) current = device.index();
    }
    c10::Stream getStream(Device device) const noexcept override {
        return c10::Stream(c10::Stream::DEFAULT, Device(kFake, device.has_index() ? device.index() : current));
    }
    c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
    c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
    DeviceIndex deviceCount() const noexcept override { return kDevices; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

at::DataPtr owned_by(const Storage& owner, Device device) {  // the memory of another storage, which stays alive
    auto* context = new Storage(owner);
    return {const_cast<void*>(owner.data()), context, [](void* p) { delete static_cast<Storage*>(p); }, device};
}

struct Allocator final : c10::Allocator {
    at::DataPtr allocate(size_t n) override {
        auto* data = std::malloc(n);
        return {data, data, &std::free, Device(kFake, current)};
    }
    at::DeleterFnPtr raw_deleter() const override { return &std::free; }
    void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
} allocator;
REGISTER_ALLOCATOR(kFake, &allocator);

struct FakeGenerator final : c10::GeneratorImpl {
    Generator cpu = at::detail::createCPUGenerator();
    explicit FakeGenerator(DeviceIndex i) : GeneratorImpl({kFake, i}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
    void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
    void set_offset(uint64_t) override { TORCH_CHECK(false, "no offset"); }
    uint64_t get_offset() const override { return 0; }
    uint64_t current_seed() const override { return cpu.current_seed(); }
    uint64_t seed() override { return cpu.seed(); }
    void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
    FakeGenerator* clone_impl() const override {
        auto* copy = new FakeGenerator(device().index());
        copy->cpu = cpu.clone();
        return copy;
    }
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return kDevices; }
    DeviceIndex getCurrentDevice() const override { return current; }
    void setCurrentDevice(DeviceIndex i) const override { current = i; }
    DeviceIndex exchangeDevice(DeviceIndex i) const override { return std::exchange(current, i); }
    DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return i < 0 ? current : exchangeDevice(i); }
    Generator getNewGenerator(DeviceIndex i) const override { return at::make_generator<FakeGenerator>(i < 0 ? current : i); }
    const Generator& getDefaultGenerator(DeviceIndex i) const override {
        static std::array<Generator, kDevices> all{getNewGenerator(0), getNewGenerator(1)};
        return all.at(i < 0 ? current : i);
    }
    void resizePrivateUse1Bytes(const Storage& storage, size_t n) const override {
        auto data = allocator.allocate(n);
        if (storage.nbytes()) std::memcpy(data.get(), storage.data(), std::min(n, storage.nbytes()));
        storage.set_data_ptr_noswap(std::move(data));
        storage.set_nbytes(n);
    }
};

// ------------------------------------------------------------------- operators, by the kernels of the CPU

Tensor tensor_of(Storage storage, c10::DispatchKey key, const Tensor& like) {
    auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
    out.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    return out;
}

struct Call {  // the aliases of one call
    std::map<StorageImpl*, Storage> on_cpu, on_device;
    std::vector<std::pair<Tensor, Tensor>> pairs;  // tensor of the device, alias
    Device device{kFake, current};

    Storage alias(const Storage& storage) {
        auto& found = on_cpu[storage.unsafeGetStorageImpl()];
        if (!found) {
            found = Storage(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                             owned_by(storage, at::kCPU), at::getCPUAllocator(), true));
            on_device[found.unsafeGetStorageImpl()] = storage;
        }
        return found;
    }
    Tensor alias(const Tensor& tensor) {
        if (!tensor.defined() || tensor.device().type() != kFake) return tensor;
        pairs.emplace_back(tensor, tensor_of(alias(tensor.storage()), c10::DispatchKey::CPU, tensor));
        return pairs.back().second;
    }
    Storage home(const Storage& storage) {  // the storage on the device that has the memory of one of the CPU
        auto& found = on_device[storage.unsafeGetStorageImpl()];
        if (!found) {
            found = Storage(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), storage.nbytes(),
                                                             owned_by(storage, device), &allocator, true));
        } else if (found.data() != storage.data()) {  // it has grown
            found.set_data_ptr_noswap(owned_by(storage, device));
            found.set_nbytes(storage.nbytes());
        }
        return found;
    }
    Tensor home(const Tensor& result) {
        if (!result.defined() || result.device().type() != at::kCPU) return result;
        for (auto& [tensor, alias] : pairs) {
            if (alias.is_same(result)) return tensor;
        }
        TORCH_CHECK_TYPE(has_float64 || result.scalar_type() != at::kDouble,
                         "Cannot convert a fakegpu Tensor to float64 dtype, as on MPS. Please use float32 instead.");
        return tensor_of(home(result.storage()), c10::DispatchKey::PrivateUse1, result);
    }
    void settle() {  // what an operator has resized, or set to another storage
        for (auto& [tensor, alias] : pairs) {
            auto* impl = tensor.unsafeGetTensorImpl();
            auto storage = home(alias.storage());
            if (!tensor.storage().is_alias_of(storage)) impl->set_storage_keep_dtype(storage);
            if (tensor.sizes() != alias.sizes() || tensor.strides() != alias.strides() ||
                tensor.storage_offset() != alias.storage_offset()) {
                impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
            }
        }
    }
};

template <class Function>
void for_tensors(const IValue& value, Function function) {
    if (value.isTensor()) function(value.toTensor());
    if (value.isTensorList()) {
        for (const Tensor& tensor : value.toTensorVector()) function(tensor);
    } else if (value.isList()) {
        for (const IValue& item : value.toListRef()) for_tensors(item, function);
    }
}

template <class Function>
IValue mapped(const IValue& value, Function function) {
    if (value.isTensor()) return function(value.toTensor());
    if (value.isTensorList()) {
        c10::List<Tensor> out;
        for (const Tensor& tensor : value.toTensorVector()) out.push_back(function(tensor));
        return out;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> out;
        for (const auto& tensor : value.toOptionalTensorVector()) {
            out.push_back(tensor ? std::optional<Tensor>(function(*tensor)) : std::nullopt);
        }
        return out;
    }
    return value;
}

Device require_one_device(const std::string& name, c10::ArrayRef<IValue> arguments) {
    std::optional<Device> device, other;
    const bool takes_numbers = lenient.count(name), takes_indices = name.find("index") != std::string::npos;
    for (size_t i = 0; i < arguments.size(); ++i) {
        if (arguments[i].isDevice() && arguments[i].toDevice().type() == kFake) device = arguments[i].toDevice();
        for_tensors(arguments[i], [&](const Tensor& t) {
            if (!t.defined()) return;
            if (t.device().type() == kFake && (!device || *device == t.device())) device = t.device();
            else if (t.is_cpu() && ((takes_numbers && t.dim() == 0) || (takes_indices && takes_numbers && i == 1))) return;
            else other = t.device();
        });
        if (arguments[i].isGenerator()) {
            TORCH_CHECK(arguments[i].toGenerator().device().type() == kFake,
                        "Expected a 'fakegpu' device type for generator but found 'cpu'");
        }
    }
    if (!device) device = Device(kFake, current);
    if (!device->has_index()) device->set_index(current);
    TORCH_CHECK(!other, "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                *other, "! (when calling ", name, ")");
    return *device;
}

void by_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const auto& schema = op.schema();
    const size_t n = schema.arguments().size(), first = stack->size() - n;
    const auto name = c10::toString(op.operator_name());
    Call call;
    call.device = require_one_device(name, c10::ArrayRef<IValue>(stack->data() + first, n));
    count(name);
    for (size_t i = first; i < stack->size(); ++i) {
        IValue& value = (*stack)[i];
        if (value.isDevice()) value = Device(at::kCPU);
        else if (value.isStorage()) value = call.alias(value.toStorage());
        else if (value.isGenerator()) {
            value = static_cast<FakeGenerator*>(value.toGenerator().unsafeGetGeneratorImpl())->cpu;
        } else value = mapped(value, [&](const Tensor& t) { return call.alias(t); });
    }
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    call.settle();
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
        (*stack)[i] = mapped((*stack)[i], [&](const Tensor& t) { return call.home(t); });
    }
}

// ------------------------------------------- operators that torch does not pass on, and copies between devices

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
    if (from.device() == to.device()) {
        count("_copy_from");
    } else {
        const std::string where = from.is_cpu() ? "to device" : to.is_cpu() ? "to host" : "between devices";
        count("copies " + where);
        count("bytes " + where, from.nbytes());
    }
    Call call;
    at::AutoDispatchBelowADInplaceOrView below;
    call.alias(to).copy_(call.alias(from));
    return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

template <class... Arguments>
void require_same(const char* name, const Arguments&... tensors) {
    const IValue values[] = {IValue(tensors)...};
    require_one_device(name, values);
}

Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                   int64_t groups) {
    count("convolution");
    Call call;
    require_same("convolution", x, weight, bias);
    call.device = x.device();
    at::AutoDispatchBelowADInplaceOrView below;
    return call.home(at::convolution(call.alias(x), call.alias(weight), bias ? call.alias(*bias) : Tensor(), stride,
                                     padding, dilation, transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& delta, const Tensor& x, const Tensor& weight,
                                                        at::IntArrayRef stride, at::IntArrayRef padding,
                                                        at::IntArrayRef dilation, bool transposed,
                                                        at::IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> mask) {
    count("convolution_backward");
    Call call;
    require_same("convolution_backward", delta, x, weight);
    call.device = x.device();
    at::AutoDispatchBelowADInplaceOrView below;
    auto [a, b, c] = at::convolution_backward(call.alias(delta), call.alias(x), call.alias(weight), weight.size(transposed ? 1 : 0),
                                              stride, padding, dilation, transposed, output_padding, groups, mask);
    return {call.home(a), call.home(b), call.home(c)};
}

// CUDA's fused cells have no kernel for the CPU: autograd differentiates the formulas.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& x, const Tensor& h, const Tensor& cx,
                                             const std::optional<Tensor>& bx, const std::optional<Tensor>& bh) {
    auto gates = x + h;
    if (bx) gates = gates + *bx + *bh;
    auto part = gates.chunk(4, 1);
    auto cy = part[1].sigmoid() * cx + part[0].sigmoid() * part[2].tanh();
    return {part[3].sigmoid() * cy.tanh(), cy, gates};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& x, const Tensor& h, const Tensor& hx,
                                    const std::optional<Tensor>& bx, const std::optional<Tensor>& bh) {
    auto a = (bx ? x + *bx : x).chunk(3, 1), b = (bh ? h + *bh : h).chunk(3, 1);
    auto reset = (a[0] + b[0]).sigmoid(), update = (a[1] + b[1]).sigmoid();
    auto fresh = (a[2] + reset * b[2]).tanh();
    return {fresh + update * (hx - fresh), fresh};
}

// cuDNN cannot differentiate recurrent layers in evaluation mode. torch composes them of other operators, and
// finds the composition under every device: the CPU's is taken, and its operators run where their tensors are.
void recurrent(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const auto& schema = op.schema();
    const size_t first = stack->size() - schema.arguments().size();
    const bool train = (*stack)[first + *schema.argumentIndexWithName("train")].toBool();
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::AutogradCPU), stack);
    const Tensor& out = (*stack)[stack->size() - schema.returns().size()].toTensor();
    if (!train && out.requires_grad()) {
        out.register_hook([](const Tensor&) { TORCH_CHECK(false, "cudnn RNN backward can only be called in training mode"); });
    }
}

#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
    AT_FORALL_LOWER_PRECISION_FP(LOWER)
    AT_FORALL_FP32(FULL)
    AT_FORALL_PROMOTE(PROMOTE)
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("convolution_overrideable", &convolution);
    m.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
    m.impl("_thnn_fused_lstm_cell", &lstm_cell);
    m.impl("_thnn_fused_gru_cell", &gru_cell);
    for (const char* name : {"lstm", "gru", "rnn_tanh", "rnn_relu"}) {
        for (const char* form : {".input", ".data"}) {  // of one length, and packed
            m.impl((std::string(name) + form).c_str(), torch::CppFunction::makeFromBoxedFunction<&recurrent>());
        }
    }
}

TORCH_LIBRARY(fakegpu, m) {
    m.def("start(str[] takes_numbers) -> ()", [](std::vector<std::string> names) {
        at::RegisterPrivateUse1HooksInterface(new Hooks);
        lenient = {names.begin(), names.end()};
    });
    m.def("allow_float64(bool allowed) -> ()", [](bool allowed) { has_float64 = allowed; });
    m.def("device() -> int", []() -> int64_t { return current; });
    m.def("set_device(int index) -> ()", [](int64_t i) { current = static_cast<DeviceIndex>(i); });
    m.def("calls() -> Dict(str, int)", [] {
        std::lock_guard<std::mutex> lock(mutex);
        c10::Dict<std::string, int64_t> out;
        for (auto& [name, n] : std::exchange(calls, {})) out.insert(name, n);
        return out;
    });
}

}  // namespace

// A GPU for machines without one: to torch it is cuda:0, its memory is the CPU's, and so are its operators.
//
// It is for a torch that was built without CUDA, and must be loaded before that is imported. As on a real one, tensors
// of two devices don't go together, memory is limited, and reading a number back makes the program wait, which is
// counted.

#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

using at::Tensor;
using c10::DeviceIndex;
using c10::IValue;
using torch::jit::Stack;

namespace {

const c10::Device kGpu(c10::DeviceType::CUDA, 0);
std::atomic<int64_t> allocated{0}, peak{0}, waits{0};

int64_t room() {
    const char *given = std::getenv("SIMULATED_GPU_BYTES");
    return given ? std::atoll(given) : 80'000'000'000;
}

// ---- what torch asks of a device

c10::Stream as_only(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, device); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return kGpu.type(); }
    c10::Device exchangeDevice(c10::Device) const override { return kGpu; }
    c10::Device getDevice() const override { return kGpu; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::Stream getStream(c10::Device device) const noexcept override { return as_only(device); }
    c10::Stream getDefaultStream(c10::Device device) const override { return as_only(device); }
    c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return getStream(stream.device()); }
    DeviceIndex deviceCount() const noexcept override { return 1; }
    void record(void **, const c10::Stream &, const DeviceIndex, const c10::EventFlag) const override {}
    void block(void *, const c10::Stream &) const override {}
    bool queryEvent(void *) const override { return true; }
    void destroyEvent(void *, const DeviceIndex) const noexcept override {}
    bool queryStream(const c10::Stream &) const override { return true; }
    void synchronizeStream(const c10::Stream &) const override {}
};
c10::impl::DeviceGuardImplRegistrar guard_registered(kGpu.type(), new Guard());

struct Hooks final : at::CUDAHooksInterface {
    explicit Hooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasCUDA() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return 1; }
    int getNumGPUs() const override { return 1; }
    DeviceIndex current_device() const override { return 0; }
    DeviceIndex getCurrentDevice() const override { return 0; }
    void setCurrentDevice(DeviceIndex) const override {}
    DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
    DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
    bool isPinnedPtr(const void *) const override { return false; }
    at::Allocator *getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
};
using HooksRegisterer =
    c10::Registerer<std::string, std::unique_ptr<at::CUDAHooksInterface>, at::CUDAHooksArgs>;
HooksRegisterer hooks_registered("CUDAHooks", at::CUDAHooksRegistry(), HooksRegisterer::DefaultCreator<Hooks>);

// ---- the same memory under another device's name

struct Held {
    c10::Storage storage;
    int64_t bytes;
};

void release(void *context) {
    auto *held = static_cast<Held *>(context);
    allocated -= held->bytes;
    delete held;
}

c10::Storage renamed(const c10::Storage &storage, c10::Device device) {
    if (device == kGpu && storage.data_ptr().get_deleter() == &release)  // an operator gave a view of what it got
        return static_cast<Held *>(storage.data_ptr().get_context())->storage;
    const int64_t bytes = device == kGpu ? static_cast<int64_t>(storage.nbytes()) : 0;
    TORCH_CHECK_WITH(OutOfMemoryError, allocated + bytes <= room(), "CUDA out of memory: a simulated GPU is full.");
    allocated += bytes;
    if (allocated > peak)
        peak = allocated.load();
    c10::DataPtr data(const_cast<void *>(storage.data()), new Held{storage, bytes}, release, device);
    return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr, false);
}

Tensor renamed(const Tensor &x, c10::Device device) {
    const auto key = device == kGpu ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
    c10::Storage storage = renamed(x.storage(), device);
    auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), x.dtype());
    result.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides());
    result.unsafeGetTensorImpl()->set_storage_offset(x.storage_offset());
    return result;
}
Tensor on_cpu(const Tensor &x) { return x.defined() && x.is_cuda() ? renamed(x, c10::kCPU) : x; }
Tensor on_gpu(const Tensor &x) { return x.defined() && !x.is_cuda() ? renamed(x, kGpu) : x; }

// ---- operators

const std::set<std::string> kWaiting = {
    "aten::_local_scalar_dense", "aten::nonzero",    "aten::masked_select", "aten::_unique2",
    "aten::unique_dim",          "aten::equal",      "aten::is_nonzero",    "aten::repeat_interleave.Tensor",
};

// Of an argument that an operator writes to, what it is on the CPU; one that is empty may have to grow.
Tensor target_on_cpu(const Tensor &x) {
    const bool may_grow = x.defined() && x.is_cuda() && x.numel() == 0;
    return may_grow ? at::empty(x.sizes(), x.options().device(c10::kCPU)) : on_cpu(x);
}

// What came of it in the place of the argument as it was given.
IValue written(const IValue &given, const IValue &result) {
    if (given.isTensor() && given.toTensor().is_cuda() && given.toTensor().sizes() != result.toTensor().sizes()) {
        Tensor grown = on_gpu(result.toTensor());
        auto *impl = given.toTensor().unsafeGetTensorImpl();
        impl->set_storage_keep_dtype(grown.storage());
        impl->set_sizes_and_strides(grown.sizes(), grown.strides());
    }
    return given;
}

bool writes(const c10::Argument &argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

void on_cpu_instead(const c10::OperatorHandle &op, Stack *stack) {
    const auto &schema = op.schema();
    if (kWaiting.count(schema.name()))
        waits++;
    const auto &arguments = schema.arguments();
    const size_t first = stack->size() - arguments.size();
    const std::vector<IValue> given(stack->begin() + first, stack->end());
    auto checked = [&](const Tensor &x) {
        const bool fits = !x.defined() || x.is_cuda() || x.dim() == 0;
        TORCH_CHECK(fits, "tensors of two devices, cuda:0 and cpu, in ", schema.name());
        return on_cpu(x);
    };
    for (size_t i = 0; i < arguments.size(); i++) {
        IValue &value = (*stack)[first + i];
        if (value.isTensor()) {
            value = writes(arguments[i]) ? target_on_cpu(value.toTensor()) : checked(value.toTensor());
        } else if (value.isTensorList()) {
            std::vector<Tensor> all = value.toTensorVector();
            for (Tensor &x : all)
                x = checked(x);
            value = all;
        } else if (value.isOptionalTensorList()) {
            c10::List<std::optional<Tensor>> all;
            for (std::optional<Tensor> x : value.toOptionalTensorList())
                all.push_back(x ? std::optional<Tensor>(checked(*x)) : x);
            value = all;
        } else if (value.isDevice() && value.toDevice().is_cuda()) {
            value = c10::Device(c10::kCPU);
        }
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    const auto &returns = schema.returns();
    for (size_t r = 0; r < returns.size(); r++) {
        IValue &value = (*stack)[stack->size() - returns.size() + r];
        if (writes(returns[r])) {
            for (size_t i = 0; i < arguments.size(); i++)
                if (writes(arguments[i]) && *arguments[i].alias_info() == *returns[r].alias_info())
                    value = written(given[i], value);
        } else if (value.isTensor()) {
            value = on_gpu(value.toTensor());
        } else if (value.isTensorList()) {
            std::vector<Tensor> all = value.toTensorVector();
            for (Tensor &x : all)
                x = on_gpu(x);
            value = all;
        }
    }
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<c10::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    const auto options = at::TensorOptions().dtype(dtype).device(c10::kCPU);
    return on_gpu(at::empty(C10_AS_INTARRAYREF_SLOW(size), options, format));
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<c10::Device>, std::optional<bool>) {
    const auto options = at::TensorOptions().dtype(dtype).device(c10::kCPU);
    return on_gpu(at::empty_strided(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), options));
}

Tensor as_strided(const Tensor &x, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(x, size, stride, offset);
}

Tensor view(const Tensor &x, at::IntArrayRef size) { return at::native::view(x, size); }

// A program waits for what comes from a GPU, and for what goes there unless it says that it does not.
Tensor &copy_(Tensor &self, const Tensor &source, bool non_blocking) {
    if (self.is_cuda() != source.is_cuda() && !(self.is_cuda() && non_blocking))
        waits++;
    on_cpu(self).copy_(on_cpu(source));
    return self;
}

Tensor &set_part(Tensor &self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                 c10::SymIntArrayRef stride) {
    auto *impl = self.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(source));
    impl->set_storage_offset(offset.expect_int());
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
    return self;
}

Tensor &set_all(Tensor &self, c10::Storage source) {
    const c10::SymInt size(static_cast<int64_t>(source.nbytes() / self.itemsize())), stride(1);
    return set_part(self, std::move(source), 0, size, stride);
}

}  // namespace

extern "C" {
int64_t gpu_waits() { return waits; }
int64_t gpu_allocated() { return allocated; }
int64_t gpu_peak() { return peak; }
int64_t gpu_room() { return room(); }
void gpu_reset_peak() { peak = allocated.load(); }
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu_instead>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
    library.impl("empty.memory_format", &empty);
    library.impl("empty_strided", &empty_strided);
    library.impl("as_strided", &as_strided);
    library.impl("view", &view);
    library.impl("copy_", &copy_);
    library.impl("set_.source_Storage", &set_all);
    library.impl("set_.source_Storage_storage_offset", &set_part);
}

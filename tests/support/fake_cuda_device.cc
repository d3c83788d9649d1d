// SPDX-License-Identifier: Apache-2.0
// Lets PyTorch have tensors "on" a GPU that hold no data, as a capture has them, without a GPU.
//
// Loaded before `import torch`, which asks once whether there is CUDA; `amp_ir_use_fake_guard` is
// called after it, when a PyTorch with CUDA has put its own guard there. Nothing can be computed.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kCuda = c10::DeviceType::CUDA;

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  at::DeviceIndex deviceCount() const override { return 1; }
  at::DeviceIndex current_device() const override { return 0; }
  at::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(at::DeviceIndex) const override {}
  at::DeviceIndex exchangeDevice(at::DeviceIndex) const override { return 0; }
  at::DeviceIndex maybeExchangeDevice(at::DeviceIndex) const override { return 0; }
  // PyTorch chooses cuDNN's ops, where it may, before it has a tensor with data.
  bool hasCuDNN() const override { return true; }
  bool compiledWithCuDNN() const override { return true; }
  long versionCuDNN() const override { return 91900; }
  long versionRuntimeCuDNN() const override { return 91900; }
  double batchnormMinEpsilonCuDNN() const override { return 0; }
};

// One device with one stream, whose work is always done.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<kCuda> {
  static c10::Stream Only() { return c10::Stream(c10::Stream::DEFAULT, {kCuda, 0}); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return {kCuda, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return {kCuda, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return Only(); }
  c10::Stream getDefaultStream(c10::Device) const override { return Only(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return Only(); }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    *event = const_cast<Guard*>(this);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
};

}  // namespace

namespace at {
// Preferred to those of a PyTorch with CUDA, which register with the default priority.
static RegistererCUDAHooksRegistry hooks("CUDAHooks", c10::REGISTRY_PREFERRED, CUDAHooksRegistry(),
                                         RegistererCUDAHooksRegistry::DefaultCreator<Hooks>);
}  // namespace at

extern "C" void amp_ir_use_fake_guard() {
  static const c10::impl::DeviceGuardImplRegistrar registrar(kCuda, new Guard());
}

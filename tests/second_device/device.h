// What the parts of the second device share.
#pragma once

#include <ATen/ATen.h>
#include <pybind11/pybind11.h>

namespace second_device {

// A tensor of the host with the memory of one of the device, which it keeps alive.
at::Tensor alias(const at::Tensor& tensor);

void define_backend(pybind11::module& module);

}  // namespace second_device

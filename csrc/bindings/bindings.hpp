// One function a topic; module.cpp calls them all.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "weightsync/control.hpp"

namespace weightsync::bindings {

// type, which a stub can name; pybind11's own metaclass serves static properties, of which we have
// none.
inline pybind11::metaclass plain_metaclass() {
    return pybind11::metaclass(reinterpret_cast<PyObject*>(&PyType_Type));
}

void bind_segments(pybind11::module_& module);
void bind_digest(pybind11::module_& module);
void bind_process_read(pybind11::module_& module);
void bind_memory(pybind11::module_& module);
void bind_objects(pybind11::module_& module);
void bind_attention(pybind11::module_& module);
void bind_linear(pybind11::module_& module);
void bind_sampling(pybind11::module_& module);
void bind_gate(pybind11::module_& module);
void bind_norm(pybind11::module_& module);
void bind_heads(pybind11::module_& module);
void bind_delta(pybind11::module_& module);
void bind_cuda(pybind11::module_& module);
void bind_cuda_memory(pybind11::module_& module);
void bind_cuda_core(pybind11::module_& module);
void bind_experts(pybind11::module_& module);
void bind_few_rows(pybind11::module_& module);

// Sizes and addresses of what is called once a layer travel as tuples in the order of the structs,
// which costs little; one module of the package is the only caller.
template <std::size_t count>
using Numbers = std::array<std::int64_t, count>;
template <std::size_t count>
using Addresses = std::array<std::uintptr_t, count>;

// Addresses cross the border as plain integers; 0 is null.
template <typename T>
T* pointer(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

inline CallControl call_control(std::uintptr_t cancel_ptr, std::uintptr_t progress_ptr) {
    if (cancel_ptr % alignof(std::int32_t) != 0 || progress_ptr % alignof(std::int64_t) != 0) {
        throw std::invalid_argument("cancel_ptr or progress_ptr is not aligned");
    }
    return {pointer<const std::int32_t>(cancel_ptr), pointer<std::int64_t>(progress_ptr)};
}

inline void check_num_threads(int num_threads) {
    if (num_threads < 1) {
        throw std::invalid_argument("num_threads is " + std::to_string(num_threads) +
                                    ", expected >= 1");
    }
}

}  // namespace weightsync::bindings

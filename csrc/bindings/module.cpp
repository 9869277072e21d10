#include "bindings.hpp"

#include <system_error>

namespace py = pybind11;

PYBIND11_MODULE(_native, module) {
    module.doc() = "Native core of weightsync; use it through weightsync.native.";
    // OSError picks its subclass (ProcessLookupError, PermissionError, ...) from errno.
    py::register_exception_translator([](std::exception_ptr error) {
        try {
            if (error) std::rethrow_exception(error);
        } catch (const std::system_error& failure) {
            const py::tuple arguments =
                py::make_tuple(failure.code().value(), py::str(failure.what()));
            PyErr_SetObject(PyExc_OSError, arguments.ptr());
        }
    });
    weightsync::bindings::bind_segments(module);
    weightsync::bindings::bind_digest(module);
    weightsync::bindings::bind_process_read(module);
    weightsync::bindings::bind_memory(module);
    weightsync::bindings::bind_objects(module);
    weightsync::bindings::bind_attention(module);
    weightsync::bindings::bind_linear(module);
    weightsync::bindings::bind_sampling(module);
    weightsync::bindings::bind_gate(module);
    weightsync::bindings::bind_norm(module);
    weightsync::bindings::bind_heads(module);
    weightsync::bindings::bind_delta(module);
    weightsync::bindings::bind_cuda(module);
    weightsync::bindings::bind_cuda_memory(module);
    weightsync::bindings::bind_cuda_core(module);
    weightsync::bindings::bind_experts(module);
    weightsync::bindings::bind_few_rows(module);
}

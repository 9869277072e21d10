#include "weightsync/memory.hpp"

#include "bindings.hpp"
#include "weightsync/device.hpp"
#include "weightsync/digest_kernels.hpp"
#include "weightsync/stream.hpp"

namespace py = pybind11;

namespace weightsync::bindings {
namespace {

void check_range(std::uintptr_t address, std::int64_t num_bytes, const char* name) {
    if (num_bytes < 0) {
        throw std::invalid_argument("num_bytes is " + std::to_string(num_bytes) +
                                    ", expected >= 0");
    }
    if (address == 0 && num_bytes > 0) {
        throw std::invalid_argument(std::string(name) + " is null");
    }
}

py::dict build_info() {
    py::dict info;
#if defined(__clang__)
    info["compiler"] = "clang " __clang_version__;
#elif defined(__GNUC__)
    info["compiler"] = "gcc " __VERSION__;
#else
    info["compiler"] = "unknown";
#endif
    info["copy_kernel"] = stream_kernel().name;
    info["digest_kernel"] = digest_kernels().name;
    info["cuda"] = py::none();
    return info;
}

}  // namespace

void bind_memory(py::module_& module) {
    module.def(
        "memcpy_bytes",
        [](std::uintptr_t target_ptr, std::uintptr_t source_ptr, std::int64_t num_bytes,
           int num_threads) {
            check_num_threads(num_threads);
            check_range(target_ptr, num_bytes, "target_ptr");
            check_range(source_ptr, num_bytes, "source_ptr");
            const py::gil_scoped_release released;
            memcpy_bytes(pointer<void>(target_ptr), pointer<const void>(source_ptr),
                         static_cast<std::size_t>(num_bytes), num_threads);
        },
        py::arg("target_ptr"), py::arg("source_ptr"), py::arg("num_bytes"), py::arg("num_threads"));
    module.def(
        "prefault",
        [](std::uintptr_t ptr, std::int64_t num_bytes) {
            check_range(ptr, num_bytes, "ptr");
            const py::gil_scoped_release released;
            prefault(pointer<void>(ptr), static_cast<std::size_t>(num_bytes));
        },
        py::arg("ptr"), py::arg("num_bytes"));
    module.def("has_cuda", &has_cuda);
    module.def("build_info", &build_info);
}

}  // namespace weightsync::bindings

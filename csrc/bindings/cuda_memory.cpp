#include "weightsync/cuda_memory.hpp"

#include <pybind11/stl.h>

#include "bindings.hpp"
#include "weightsync/cuda_arena.hpp"

namespace py = pybind11;

namespace weightsync::bindings {

void bind_cuda_memory(py::module_& module) {
    using released = py::call_guard<py::gil_scoped_release>;
    module.def("cuda_held", [] {
        const CudaHeld held = cuda_held();
        return py::make_tuple(held.num_allocations, held.num_mappings);
    });
    module.def("cuda_malloc", &cuda_malloc, py::arg("num_bytes"), py::arg("device"), released());
    module.def("cuda_free", &cuda_free, py::arg("ptr"), py::arg("device"), released());
    module.def("cuda_malloc_host", &cuda_malloc_host, py::arg("num_bytes"), py::arg("device"),
               released());
    module.def("cuda_free_host", &cuda_free_host, py::arg("ptr"), py::arg("device"), released());
    module.def("cuda_free_bytes", &cuda_free_bytes, py::arg("device"), released());
    module.def("cuda_current_device", &cuda_current_device);
    module.def("cuda_use_device", &cuda_use_device, py::arg("device"), released());
    module.def("cuda_num_devices", &cuda_num_devices);
    module.def("cuda_driver_version", &cuda_driver_version);
    module.def(
        "cuda_device_info",
        [](int device) {
            const CudaDeviceInfo found = cuda_device_info(device);
            return py::make_tuple(found.name, found.num_bytes, found.major, found.minor);
        },
        py::arg("device"));
    module.def(
        "cuda_device_uuid", [](int device) { return py::bytes(cuda_device_uuid(device)); },
        py::arg("device"));
    module.def(
        "cuda_allocation",
        [](std::uint64_t ptr, int device) {
            const CudaAllocation found = cuda_allocation(ptr, device);
            return py::make_tuple(found.base, found.num_bytes, found.id,
                                  static_cast<int>(found.sharing));
        },
        py::arg("ptr"), py::arg("device"));
    module.def(
        "cuda_export",
        [](std::uint64_t base, int device) { return py::bytes(cuda_export(base, device)); },
        py::arg("base"), py::arg("device"));
    module.def(
        "cuda_map",
        [](const std::string& handle, int device) {
            const py::gil_scoped_release unlocked;
            return cuda_map(handle, device);
        },
        py::arg("handle"), py::arg("device"));
    module.def("cuda_unmap", &cuda_unmap, py::arg("base"), py::arg("device"), released());
    module.def("cuda_export_fd", &cuda_export_fd, py::arg("base"), py::arg("device"), released());
    module.def("cuda_import_fd", &cuda_import_fd, py::arg("fd"), py::arg("device"), released());
    module.def("cuda_release_handle", &cuda_release_handle, py::arg("handle"), py::arg("device"),
               released());
    module.def("cuda_map_handles", &cuda_map_handles, py::arg("handles"), py::arg("num_bytes"),
               py::arg("device"), released());
    module.def("cuda_unmap_handles", &cuda_unmap_handles, py::arg("base"), py::arg("num_bytes"),
               py::arg("device"), released());
    module.def(
        "cuda_arena_reserve",
        [](std::uint64_t num_bytes, int device) {
            const ArenaRange range = cuda_arena_reserve(num_bytes, device);
            return py::make_tuple(range.base, range.num_bytes);
        },
        py::arg("num_bytes"), py::arg("device"));
    module.def("cuda_arena_map", &cuda_arena_map, py::arg("base"), py::arg("piece_ends"),
               py::arg("device"), released());
    module.def("cuda_arena_unmap", &cuda_arena_unmap, py::arg("base"), py::arg("device"),
               released());
    module.def("cuda_arena_free", &cuda_arena_free, py::arg("base"), py::arg("device"), released());
    module.def("cuda_pool_own", &cuda_pool_own, py::arg("owner"));
    module.def(
        "cuda_pool_ranges",
        [](std::uint64_t owner) {
            py::list found;
            for (const ArenaRange& range : cuda_pool_ranges(owner)) {
                found.append(py::make_tuple(range.base, range.num_bytes));
            }
            return found;
        },
        py::arg("owner"));
    module.def("cuda_create_stream", &cuda_create_stream, py::arg("device"),
               py::arg("priority") = 0, released());
    module.def("cuda_wait_stream", &cuda_wait_stream, py::arg("stream"), py::arg("device"),
               released());
    module.def("cuda_create_event", &cuda_create_event, py::arg("device"), released());
    module.def("cuda_destroy_event", &cuda_destroy_event, py::arg("event"), py::arg("device"),
               released());
    module.def("cuda_record_event", &cuda_record_event, py::arg("event"), py::arg("stream"),
               py::arg("device"), released());
    module.def("cuda_elapsed_s", &cuda_elapsed_s, py::arg("start"), py::arg("stop"),
               py::arg("device"), released());
    module.def("cuda_wait_event", &cuda_wait_event, py::arg("event"), py::arg("device"),
               released());
    module.def("cuda_event_passed", &cuda_event_passed, py::arg("event"), py::arg("device"),
               released());
    module.def("cuda_synchronize", &cuda_synchronize, py::arg("device"), released());
    module.def("cuda_copy", &cuda_copy, py::arg("target_ptr"), py::arg("source_ptr"),
               py::arg("num_bytes"), py::arg("device"), released());
}

}  // namespace weightsync::bindings

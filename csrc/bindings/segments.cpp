#include "weightsync/segments.hpp"

#include "bindings.hpp"

namespace py = pybind11;

namespace weightsync::bindings {

void bind_segments(py::module_& module) {
    module.attr("NUM_SEGMENT_COLUMNS") = kSegmentColumns;
    module.def(
        "copy_segments",
        [](std::uintptr_t table_ptr, std::int64_t num_segments, int num_threads,
           std::uintptr_t cancel_ptr, std::uintptr_t progress_ptr) {
            check_num_threads(num_threads);
            const CallControl control = call_control(cancel_ptr, progress_ptr);
            const py::gil_scoped_release released;
            return copy_segments(pointer<const Segment>(table_ptr), num_segments, num_threads,
                                 control);
        },
        py::arg("table_ptr"), py::arg("num_segments"), py::arg("num_threads"),
        py::arg("cancel_ptr") = 0, py::arg("progress_ptr") = 0);
}

}  // namespace weightsync::bindings

#include "weightsync/cuda_core.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <vector>

#include "bindings.hpp"
#include "weightsync/cuda_attention.hpp"
#include "weightsync/peer_sum.hpp"

namespace py = pybind11;

namespace weightsync::bindings {
namespace {

FloatType checked_dtype(int dtype) {
    if (dtype < 0 || dtype > static_cast<int>(FloatType::fp16)) {
        throw std::invalid_argument("unknown dtype code " + std::to_string(dtype));
    }
    return static_cast<FloatType>(dtype);
}

AttentionStep step_from(int dtype, float scale, const Numbers<9>& sizes,
                        const Addresses<7>& pointers) {
    AttentionStep step{};
    step.dtype = checked_dtype(dtype);
    step.scale = scale;
    step.num_rows = sizes[0];
    step.num_sequences = sizes[1];
    step.num_heads = sizes[2];
    step.num_kv_heads = sizes[3];
    step.head_dim = sizes[4];
    step.num_pages = sizes[5];
    step.page_size = sizes[6];
    step.table_width = sizes[7];
    step.query_stride = sizes[8];
    step.query = pointer<const void>(pointers[0]);
    step.output = pointer<void>(pointers[1]);
    step.cache_keys = pointer<void>(pointers[2]);
    step.cache_values = pointer<void>(pointers[3]);
    step.query_starts = pointer<const std::int32_t>(pointers[4]);
    step.context_lens = pointer<const std::int32_t>(pointers[5]);
    step.block_tables = pointer<const std::int32_t>(pointers[6]);
    return step;
}

AttentionWork work_from(const Numbers<5>& limits, const Addresses<5>& pointers) {
    return {pointer<SplitItem>(pointers[0]),
            pointer<TileItem>(pointers[1]),
            pointer<AttentionCounts>(pointers[2]),
            pointer<std::int32_t>(pointers[3]),
            pointer<float>(pointers[4]),
            limits[0],
            limits[1],
            limits[2],
            static_cast<int>(limits[3]),
            static_cast<int>(limits[4])};
}

void bind_attention_calls(py::module_& module) {
    module.attr("ATTENTION_ENTRIES") = py::make_tuple(kWarpEntries, kTileEntries);
    module.def(
        "no_tensor_cores_reason",
        [](int dtype, std::int64_t num_heads, std::int64_t num_kv_heads, std::int64_t head_dim) {
            return no_tensor_cores_reason(checked_dtype(dtype), num_heads, num_kv_heads, head_dim);
        },
        py::arg("dtype"), py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("head_dim"));
    const auto bind_with_work = [&](const char* name, auto function) {
        module.def(
            name,
            [function](int dtype, float scale, const Numbers<9>& sizes,
                       const Addresses<7>& pointers, const Numbers<5>& limits,
                       const Addresses<5>& work, std::uintptr_t stream, int device) {
                const AttentionStep step = step_from(dtype, scale, sizes, pointers);
                const py::gil_scoped_release released;
                function(step, work_from(limits, work), stream, device);
            },
            py::arg("dtype"), py::arg("scale"), py::arg("sizes"), py::arg("pointers"),
            py::arg("limits"), py::arg("work"), py::arg("stream"), py::arg("device"));
    };
    bind_with_work("cuda_plan_attention", &cuda_plan_attention);
    bind_with_work("cuda_attend", &cuda_attend);
    module.def(
        "cuda_attend_general",
        [](int dtype, float scale, const Numbers<9>& sizes, const Addresses<7>& pointers,
           std::uintptr_t stream, int device) {
            const AttentionStep step = step_from(dtype, scale, sizes, pointers);
            const py::gil_scoped_release released;
            cuda_attend_general(step, stream, device);
        },
        py::arg("dtype"), py::arg("scale"), py::arg("sizes"), py::arg("pointers"),
        py::arg("stream"), py::arg("device"));
    // The CPU's twin of the plan, for tests.
    module.def(
        "plan_attention",
        [](const Numbers<9>& sizes, const Addresses<7>& pointers, const Numbers<5>& limits,
           const Addresses<5>& work) {
            plan_attention(step_from(0, 1.0f, sizes, pointers), work_from(limits, work));
        },
        py::arg("sizes"), py::arg("pointers"), py::arg("limits"), py::arg("work"));
}

void bind_norms(py::module_& module) {
    module.def(
        "cuda_norm_rows",
        [](int dtype, float eps, const Numbers<5>& sizes, const Addresses<3>& pointers,
           std::uintptr_t stream, int device) {
            const NormedRows rows{checked_dtype(dtype),
                                  sizes[0],
                                  sizes[1],
                                  sizes[2],
                                  sizes[3],
                                  sizes[4],
                                  eps,
                                  pointer<const void>(pointers[0]),
                                  pointer<const void>(pointers[1]),
                                  pointer<void>(pointers[2])};
            const py::gil_scoped_release released;
            cuda_norm_rows(rows, stream, device);
        },
        py::arg("dtype"), py::arg("eps"), py::arg("sizes"), py::arg("pointers"), py::arg("stream"),
        py::arg("device"));
    module.def(
        "cuda_add_norm_rows",
        [](int dtype, float eps, const Numbers<2>& sizes, const Addresses<4>& pointers,
           std::uintptr_t stream, int device) {
            const AddedRows rows{checked_dtype(dtype),
                                 sizes[0],
                                 sizes[1],
                                 eps,
                                 pointer<void>(pointers[0]),
                                 pointer<const void>(pointers[1]),
                                 pointer<const void>(pointers[2]),
                                 pointer<void>(pointers[3])};
            const py::gil_scoped_release released;
            cuda_add_norm_rows(rows, stream, device);
        },
        py::arg("dtype"), py::arg("eps"), py::arg("sizes"), py::arg("pointers"), py::arg("stream"),
        py::arg("device"));
}

void bind_rows(py::module_& module) {
    module.def(
        "cuda_gate_rows",
        [](int dtype, const Numbers<3>& sizes, const Addresses<2>& pointers, std::uintptr_t stream,
           int device) {
            const GatedRows rows{checked_dtype(dtype),
                                 sizes[0],
                                 sizes[1],
                                 sizes[2],
                                 pointer<const void>(pointers[0]),
                                 pointer<void>(pointers[1])};
            const py::gil_scoped_release released;
            cuda_gate_rows(rows, stream, device);
        },
        py::arg("dtype"), py::arg("sizes"), py::arg("pointers"), py::arg("stream"),
        py::arg("device"));
    module.def(
        "cuda_place_heads",
        [](int dtype, float eps, const Numbers<5>& sizes, const Addresses<9>& pointers,
           std::uintptr_t stream, int device) {
            const HeadRows rows{checked_dtype(dtype),
                                sizes[0],
                                sizes[1],
                                sizes[2],
                                sizes[3],
                                sizes[4],
                                eps,
                                pointer<void>(pointers[0]),
                                pointer<const void>(pointers[1]),
                                pointer<const void>(pointers[2]),
                                pointer<const void>(pointers[3]),
                                pointer<const void>(pointers[4]),
                                pointer<const std::int64_t>(pointers[5]),
                                pointer<const std::int64_t>(pointers[6]),
                                pointer<void>(pointers[7]),
                                pointer<void>(pointers[8])};
            const py::gil_scoped_release released;
            cuda_place_heads(rows, stream, device);
        },
        py::arg("dtype"), py::arg("eps"), py::arg("sizes"), py::arg("pointers"), py::arg("stream"),
        py::arg("device"));
}

void bind_sampling_calls(py::module_& module) {
    module.def("sample_scratch_bytes", &sample_scratch_bytes, py::arg("num_rows"),
               py::arg("vocab_size"));
    module.def(
        "cuda_sample_rows",
        [](int dtype, const Numbers<3>& sizes, const Addresses<10>& pointers, std::uintptr_t stream,
           int device) {
            const SampledRows rows{checked_dtype(dtype),
                                   sizes[0],
                                   sizes[1],
                                   sizes[2],
                                   pointer<const void>(pointers[0]),
                                   pointer<const float>(pointers[1]),
                                   pointer<const std::uint64_t>(pointers[2]),
                                   pointer<const std::int64_t>(pointers[3]),
                                   pointer<const float>(pointers[4]),
                                   pointer<const float>(pointers[5]),
                                   pointer<const std::int64_t>(pointers[6]),
                                   pointer<std::int64_t>(pointers[7]),
                                   pointer<float>(pointers[8]),
                                   pointer<void>(pointers[9])};
            const py::gil_scoped_release released;
            cuda_sample_rows(rows, stream, device);
        },
        py::arg("dtype"), py::arg("sizes"), py::arg("pointers"), py::arg("stream"),
        py::arg("device"));
}

DecodeRows decode_rows_from(const Numbers<3>& sizes, const Addresses<8>& pointers) {
    return {sizes[0],
            sizes[1],
            sizes[2],
            pointer<std::int64_t>(pointers[0]),
            pointer<std::int64_t>(pointers[1]),
            pointer<std::int64_t>(pointers[2]),
            pointer<std::int64_t>(pointers[3]),
            pointer<std::int64_t>(pointers[4]),
            pointer<std::int32_t>(pointers[5]),
            pointer<std::int32_t>(pointers[6]),
            pointer<const std::int64_t>(pointers[7])};
}

// Each on the device, and its twin on the host.
void bind_decode_rows(py::module_& module) {
    const auto bind_pair = [&](const char* name, auto on_device, const char* twin, auto on_host) {
        module.def(
            name,
            [on_device](const Numbers<3>& sizes, const Addresses<8>& pointers,
                        std::uintptr_t stream, int device) {
                on_device(decode_rows_from(sizes, pointers), stream, device);
            },
            py::arg("sizes"), py::arg("pointers"), py::arg("stream"), py::arg("device"));
        module.def(
            twin,
            [on_host](const Numbers<3>& sizes, const Addresses<8>& pointers) {
                on_host(decode_rows_from(sizes, pointers));
            },
            py::arg("sizes"), py::arg("pointers"));
    };
    bind_pair("cuda_place_rows", &cuda_place_rows, "place_rows", &place_rows);
    bind_pair("cuda_advance_rows", &cuda_advance_rows, "advance_rows", &advance_rows);
}

void bind_peer_sum(py::module_& module) {
    module.attr("MAX_PEERS") = kMaxPeers;
    module.def("mailbox_bytes", &mailbox_bytes, py::arg("size"), py::arg("slot_bytes"));
    module.attr("MAILBOX_HEAD_BYTES") = kMailboxHeadBytes;
    module.def(
        "cuda_peer_sum",
        [](int dtype, const Numbers<5>& sizes, const Addresses<2>& pointers,
           const std::vector<std::uint64_t>& mailboxes, std::uintptr_t stream, int device) {
            PeerSum sum{};
            sum.dtype = checked_dtype(dtype);
            sum.num_bytes = sizes[0];
            sum.slot_bytes = sizes[1];
            sum.limit_ns = sizes[2];
            sum.rank = static_cast<int>(sizes[3]);
            sum.size = static_cast<int>(sizes[4]);
            sum.part = pointer<const void>(pointers[0]);
            sum.sum = pointer<void>(pointers[1]);
            if (mailboxes.size() != static_cast<std::size_t>(sum.size) || sum.size > kMaxPeers) {
                throw std::invalid_argument("peer_sum: a mailbox for each of 2 to 8 ranks");
            }
            std::copy(mailboxes.begin(), mailboxes.end(), sum.mailboxes);
            const py::gil_scoped_release released;
            cuda_peer_sum(sum, stream, device);
        },
        py::arg("dtype"), py::arg("sizes"), py::arg("pointers"), py::arg("mailboxes"),
        py::arg("stream"), py::arg("device"));
    module.def(
        "add_parts",
        [](int dtype, std::int64_t num_bytes, int size, std::uintptr_t parts, std::uintptr_t sum) {
            const py::gil_scoped_release released;
            add_parts(checked_dtype(dtype), num_bytes, size, pointer<const void>(parts),
                      pointer<void>(sum));
        },
        py::arg("dtype"), py::arg("num_bytes"), py::arg("size"), py::arg("parts"), py::arg("sum"));
}

}  // namespace

void bind_cuda_core(py::module_& module) {
    bind_attention_calls(module);
    bind_norms(module);
    bind_rows(module);
    bind_sampling_calls(module);
    bind_decode_rows(module);
    bind_peer_sum(module);
    module.def("cuda_read_bytes", &cuda_read_bytes, py::arg("source_ptr"), py::arg("num_bytes"),
               py::arg("out_ptr"), py::arg("stream"), py::arg("device"),
               py::call_guard<py::gil_scoped_release>());
}

}  // namespace weightsync::bindings

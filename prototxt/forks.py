"""Fields and layer types that BVLC Caffe never had, and the fork they come from: for error messages alone."""

from __future__ import annotations

_SSD = "SSD Caffe"
_YOLO = "the YOLO forks"
_SEGNET = "SegNet's Caffe"
_DEEPLAB = "DeepLab's Caffe"
_NVIDIA = "NVIDIA's Caffe"
_RCNN = "Fast R-CNN's Caffe"
_RFCN = "R-FCN's Caffe"
_MSCNN = "MS-CNN's Caffe"
_PVANET = "PVANET's Caffe"
_FLOW = "FlowNet's Caffe"
_INTEL = "Intel's Caffe"
_SPARK = "CaffeOnSpark"
_POSE = "the pose estimation forks"
_VIDEO = "C3D and the video forks"
_GREEN = "the Greentea fork"
_SPP = "SPP-net's Caffe"
_FACES = "the face recognition forks"
_LSTM = "the LSTM forks"
_CRNN = "CRNN's Caffe"
_TRANSFER = "the transfer learning forks"
_SPATIAL = "the spatial transformer forks"
_CRF = "CRF-RNN's Caffe"
_MOBILE = "the MobileNet forks"
_DENSE = "the DenseNet and ResNeXt forks"
_PSP = "DeepLab's and PSPNet's Caffe"
_BN = "SegNet's, DeepLab's and PSPNet's Caffe"

FORK_FIELDS = {
    "annotated_data_param": _SSD,
    "detection_evaluate_param": _SSD,
    "detection_output_param": _SSD,
    "distort_param": _SSD,
    "emit_constraint": _SSD,
    "expand_param": _SSD,
    "multibox_loss_param": _SSD,
    "noise_param": _SSD,
    "norm_param": _SSD,
    "permute_param": _SSD,
    "prior_box_param": _SSD,
    "resize_param": _SSD,
    "video_data_param": _SSD,
    "detection_loss_param": _YOLO,
    "region_loss_param": _YOLO,
    "reorg_param": _YOLO,
    "yolov3_param": _YOLO,
    "dense_image_data_param": _SEGNET,
    "upsample_param": _SEGNET,
    "weight_by_label_freqs": _SEGNET,
    "class_weighting": _SEGNET,
    "bn_param": _BN,
    "interp_param": _PSP,
    "mat_read_param": _DEEPLAB,
    "mat_write_param": _DEEPLAB,
    "seg_accuracy_param": _DEEPLAB,
    "seg_refine_param": _DEEPLAB,
    "unique_label_param": _DEEPLAB,
    "scale_bias": _NVIDIA,
    "scale_filler": _NVIDIA,
    "bias_filler": _NVIDIA,
    "detectnet_augmentation_param": _NVIDIA,
    "detectnet_groundtruth_param": _NVIDIA,
    "default_forward_type": _NVIDIA,
    "default_backward_type": _NVIDIA,
    "global_grad_scale": _NVIDIA,
    "rampup_interval": _NVIDIA,
    "larc": _NVIDIA,
    "larc_policy": _NVIDIA,
    "roi_pooling_param": _RCNN,
    "smooth_l1_loss_param": _RCNN,
    "psroi_pooling_param": _RFCN,
    "box_annotator_ohem_param": _RFCN,
    "roi_warping_param": "MNC's Caffe",
    "augmentation_param": _FLOW,
    "correlation_param": _FLOW,
    "custom_data_param": _FLOW,
    "flow_warp_param": _FLOW,
    "l1_loss_param": _FLOW,
    "shuffle_channel_param": "the ShuffleNet forks",
    "conv_depthwise_param": _MOBILE,
    "center_loss_param": _FACES,
    "triplet_loss_param": _FACES,
    "margin_inner_product_param": "SphereFace's Caffe",
    "multi_stage_meanfield_param": _CRF,
    "ceil_mode": _DENSE,
    "stepearly": _SSD,
    "eval_type": _SSD,
    "ap_version": _SSD,
    "show_per_class_result": _SSD,
    "plateau_winsize": f"{_SSD} and {_PVANET}",
    "warmup_iter": _INTEL,
    "warmup_start_lr": _INTEL,
    "local_lr_auto": _INTEL,
    "local_gw_ratio": _INTEL,
    "engine_type": _INTEL,
    "yolo_detection_output_param": _YOLO,
    "yolov3_detection_output_param": _YOLO,
    "eval_detection_param": _YOLO,
    "box_output_param": _MSCNN,
    "box_group_output_param": _MSCNN,
    "decode_bbox_param": _MSCNN,
    "detection_data_param": _MSCNN,
    "detection_group_loss_param": _MSCNN,
    "image_gt_data_param": _MSCNN,
    "proposal_target_param": _MSCNN,
    "proposal_param": f"{_PVANET} and {_NVIDIA}",
    "affinity_param": _GREEN,
    "malis_param": _GREEN,
    "mergecrop_param": _GREEN,
    "cpm_transform_param": _POSE,
    "source_class": _SPARK,
    "cos_data_param": _SPARK,
    "lstm_param": _LSTM,
    "repeat_param": _SPATIAL,
    "st_param": _SPATIAL,
    "transpose_param": f"CTPN's Caffe and {_CRNN}",
    "reverse_param": "CTPN's Caffe",
    "ctc_loss_param": _CRNN,
    "continuation_indicator_param": _CRNN,
    "labelsequence_accuracy_param": _CRNN,
    "mmd_param": _TRANSFER,
    "entropy_param": _TRANSFER,
    "vstep_lr": _SPP,
    "vstep_size": _SPP,
    "conv_param": _SPP,
    "kernel_shape": _VIDEO,
    "kernel_depth": _VIDEO,
    "temporal_stride": _VIDEO,
    "crop_h": _VIDEO,
    "crop_w": _VIDEO,
    "axpy_param": "SENet's Caffe",
    "richness": "another fork",
    # Names that other messages have: with the message's own.
    "DataParameter.shuffle": _INTEL,
    "ImageDataParameter.label": "another fork",
    "ImageDataParameter.label_type": _DEEPLAB,
    "ImageDataParameter.normalize": "another fork",
    "MemoryDataParameter.dim": _GREEN,
    "WindowDataParameter.shuffle": "another fork",
}
FORK_TYPES = {
    "AnnotatedData": _SSD,
    "DetectionEvaluate": _SSD,
    "DetectionOutput": _SSD,
    "MultiBoxLoss": _SSD,
    "Normalize": _SSD,
    "Permute": _SSD,
    "PriorBox": _SSD,
    "SmoothL1Loss": f"{_RCNN} and {_SSD}",
    "ROIPooling": _RCNN,
    "ROIAlign": _RCNN,
    "PSROIPooling": _RFCN,
    "BoxAnnotatorOHEM": _RFCN,
    "SmoothL1LossOHEM": _RFCN,
    "SoftmaxWithLossOHEM": _RFCN,
    "Proposal": f"{_PVANET} and {_NVIDIA}",
    "BN": _BN,
    "Interp": _PSP,
    "ImageSegData": _DEEPLAB,
    "SegAccuracy": _DEEPLAB,
    "MatWrite": _DEEPLAB,
    "MatRead": _DEEPLAB,
    "DenseCRF": _DEEPLAB,
    "DenseImageData": _SEGNET,
    "Upsample": f"{_SEGNET} and {_YOLO}",
    "ConvolutionDepthwise": _MOBILE,
    "DepthwiseConvolution": _MOBILE,
    "ReLU6": _MOBILE,
    "ShuffleChannel": "the ShuffleNet forks",
    "Axpy": "SENet's Caffe",
    "Lstm": _LSTM,
    "ContinuationIndicator": _CRNN,
    "CtcLoss": _CRNN,
    "LabelsequenceAccuracy": _CRNN,
    "Reverse": "CTPN's Caffe",
    "Transpose": f"CTPN's Caffe and {_CRNN}",
    "SpatialTransformer": _SPATIAL,
    "Repeat": _SPATIAL,
    "Region": _YOLO,
    "RegionLoss": _YOLO,
    "Reorg": _YOLO,
    "EvalDetection": _YOLO,
    "DetectionLoss": _YOLO,
    "YoloDetectionOutput": _YOLO,
    "Yolov3": _YOLO,
    "Yolov3DetectionOutput": _YOLO,
    "BboxAccuracy": _MSCNN,
    "BoxGroupOutput": _MSCNN,
    "BoxOutput": _MSCNN,
    "DecodeBBox": _MSCNN,
    "DetectionAccuracy": _MSCNN,
    "DetectionData": _MSCNN,
    "DetectionGroupAccuracy": _MSCNN,
    "DetectionGroupLoss": _MSCNN,
    "ImageGtData": _MSCNN,
    "ProposalTarget": _MSCNN,
    "Affinity": _GREEN,
    "ConnectedComponent": _GREEN,
    "MalisLoss": _GREEN,
    "MergeCrop": _GREEN,
    "MultiStageMeanfield": _CRF,
    "CPMData": _POSE,
    "CoSData": _SPARK,
    "CenterLoss": _FACES,
    "L2Norm": _FACES,
    "TripletLoss": _FACES,
    "BatchTripletLoss": _FACES,
    "MarginInnerProduct": "SphereFace's Caffe",
    "MMDLoss": _TRANSFER,
    "VideoData": f"{_VIDEO} and {_SSD}",
    "Convolution3D": _VIDEO,
    "Deconvolution3D": _VIDEO,
    "Pooling3D": _VIDEO,
    "NdConvolution": _VIDEO,
    "NdPooling": _VIDEO,
    "L1Loss": f"{_FLOW} and {_NVIDIA}",
    "Correlation": _FLOW,
    "FlowWarp": _FLOW,
    "CustomData": _FLOW,
    "DataAugmentation": _FLOW,
    "Resample": _FLOW,
    "DetectNetTransformation": _NVIDIA,
    "DiceCoefLoss": "the text and medical segmentation forks",
    "LayerNorm": "another fork",
}
# What to write in BVLC's own words where there are some.
INSTEAD = {
    "ceil_mode": "round_mode: FLOOR says the same as ceil_mode: false, and CEIL is the default",
    "kernel_shape": "kernel_size may be given once an axis",
    "ConvolutionDepthwise": "Convolution with group: num_output computes the same",
    "DepthwiseConvolution": "Convolution with group: num_output computes the same",
    "ReLU6": "Clip with min: 0 and max: 6 computes the same",
    "Convolution3D": "Convolution takes three spatial axes",
    "NdConvolution": "Convolution takes any number of spatial axes",
    "Lstm": "LSTM is BVLC's own; its weights are laid out in another way",
}


def origin(name: str, homes: dict[str, str]) -> str | None:
    """The end of an error's text about what is a fork's, with what to write instead; None for others."""
    if name not in homes:
        return None
    instead = f"; {INSTEAD[name]}" if name in INSTEAD else ""
    if homes[name] == "another fork":
        return f"it comes from a fork of Caffe that is not supported{instead}"
    return f"it comes from {homes[name]}, a fork of Caffe that is not supported{instead}"

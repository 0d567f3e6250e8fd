// Draws a dashboard's JSON with the components that Grafana draws its panels with: draw(dashboard, results, range).
// `results` are Prometheus's answers by panel id and refId; nothing is requested from here.
import {useLayoutEffect, useState} from 'react';
import {createRoot} from 'react-dom/client';
import {
  FieldConfigProperty, FieldType, applyFieldOverrides, cacheFieldDisplayNames, createTheme, dateTime, getDisplayValueAlignmentFactors,
  getFieldDisplayName, getFieldDisplayValues, renderMarkdown, standardFieldConfigEditorRegistry, standardTransformers, standardTransformersRegistry, toDataFrame, transformDataFrame,
} from '@grafana/data';
import {BarGauge, BigValue, GlobalStyles, PanelChrome, ThemeContext, TimeSeries, VizRepeater} from '@grafana/ui';
import {TableNG} from '@grafana/ui/unstable';

const WIDTH = 1400, COLUMNS = 24, GAP = 8, UNIT = 30; // Grafana's grid: 30 pixels, with 8 between panels
const CUSTOM = ['drawStyle', 'lineWidth', 'fillOpacity', 'showPoints', 'spanNulls', 'stacking', 'thresholdsStyle', 'width', 'align', 'axisSoftMax', 'scaleDistribution'];
const theme = createTheme({colors: {mode: 'light'}});
const asIs = {process: (value) => value, shouldApply: () => true};

standardFieldConfigEditorRegistry.setInit(() => [
  ...Object.values(FieldConfigProperty).map((id) => ({...asIs, id, path: id, name: id})),
  ...CUSTOM.map((path) => ({...asIs, id: `custom.${path}`, path, name: path, isCustom: true})),
]);
const {organizeFieldsTransformer, filterFieldsByNameTransformer, groupingToMatrixTransformer} = standardTransformers;
standardTransformersRegistry.setInit(() => [organizeFieldsTransformer, filterFieldsByNameTransformer, groupingToMatrixTransformer]
  .map((transformation) => ({id: transformation.id, name: transformation.name, transformation: async () => transformation})));

const named = (format, labels) => format === '__auto' ? undefined : format.replace(/{{\s*(\w+)\s*}}/g, (_, name) => labels[name] ?? '');

// A missing sample is a gap: Grafana's data source adds it as null, and its panel turns NaN into null, too.
function series(target, {metric: {__name__, ...labels}, values}, {from, to, step}) {
  const at = new Map(values.map(([time, value]) => [Math.round(time), Number(value)]));
  const times = Array.from({length: Math.floor((to - from) / step) + 1}, (_, i) => from + i * step);
  const config = {displayNameFromDS: named(target.legendFormat, labels)};
  return toDataFrame({refId: target.refId, fields: [
    {name: 'Time', type: FieldType.time, values: times.map((time) => time * 1000)},
    {name: 'Value', type: FieldType.number, labels, config, values: times.map((time) => Number.isFinite(at.get(time)) ? at.get(time) : null)},
  ]});
}

function table(target, rows) {
  const names = [...new Set(rows.flatMap(({metric}) => Object.keys(metric)))].sort();
  return toDataFrame({refId: target.refId, fields: [
    {name: 'Time', type: FieldType.time, values: rows.map(({value}) => value[0] * 1000)},
    ...names.map((name) => ({name, type: FieldType.string, values: rows.map(({metric}) => metric[name] ?? '')})),
    {name: 'Value', type: FieldType.number, values: rows.map(({value}) => Number(value[1]))},
  ]});
}

function framesOf(panel, results, range) {
  return (panel.targets ?? []).flatMap((target) => {
    const found = results[target.refId] ?? [];
    if (target.format === 'table') return found.length ? [table(target, found)] : [];
    return found.map((one) => series(target, 'value' in one ? {...one, values: [one.value]} : one,
      'value' in one ? {from: Math.round(one.value[0]), to: Math.round(one.value[0]), step: 1} : range));
  });
}

function Repeated({panel, frames, width, height, children}) {
  const {reduceOptions, orientation = 'auto'} = panel.options;
  const values = () => getFieldDisplayValues({data: frames, reduceOptions, fieldConfig: panel.fieldConfig, replaceVariables: (text) => text, theme, timeZone: 'utc'});
  return <VizRepeater {...{width, height, orientation}} source={frames} renderCounter={0} getValues={values}
    getAlignmentFactors={getDisplayValueAlignmentFactors} autoGrid itemSpacing={3} minVizHeight={16} minVizWidth={8} renderValue={children} />;
}

// Grafana publishes no component for state timelines: bars of equal states, as its panel merges them.
function Timeline({frames, range, width}) {
  const share = (time) => 100 * (time / 1000 - range.from) / (range.to - range.from);
  return <div style={{padding: '4px 8px', width}}>{frames.map((frame, row) => {
    const [times, field] = frame.fields, bars = [];
    times.values.forEach((time, i) => {
      const value = field.values[i];
      if (value == null) return bars.push(null);
      const last = bars.at(-1);
      if (last?.value === value) last.to = time; else bars.push({value, from: last ? last.to : time, to: time});
    });
    return <div key={row} style={{display: 'flex', alignItems: 'center', height: 30}}>
      <div data-name style={{width: 150, fontSize: 12, overflow: 'hidden', textOverflow: 'ellipsis', whiteSpace: 'nowrap'}}>{getFieldDisplayName(field, frame, frames)}</div>
      <div style={{position: 'relative', flex: 1, height: 22}}>{bars.filter(Boolean).map(({value, from, to}, i) => {
        const {text, color} = field.display(value);
        return <div key={i} data-bar style={{position: 'absolute', left: `${share(from)}%`, width: `${Math.max(0.3, share(to) - share(from))}%`, height: '100%', background: color,
          color: theme.colors.getContrastText(color), fontSize: 12, padding: '2px 4px', overflow: 'hidden', whiteSpace: 'nowrap'}}>{text}</div>;
      })}</div></div>;
  })}</div>;
}

function Body({panel, frames, range, width, height}) {
  if (panel.type === 'text') return <div className="markdown-html" style={{padding: 8}} dangerouslySetInnerHTML={{__html: renderMarkdown(panel.options.content)}} />;
  if (!frames.length) return <div data-empty style={{height, display: 'grid', placeItems: 'center', color: theme.colors.text.secondary}}>{panel.fieldConfig.defaults.noValue ?? 'No data'}</div>;
  const timeRange = {from: dateTime(range.from * 1000), to: dateTime(range.to * 1000), raw: {from: 'now-1h', to: 'now'}};
  switch (panel.type) {
    case 'timeseries': return <TimeSeries {...{frames, timeRange, width, height}} timeZone="utc" structureRev={1} legend={panel.options.legend} />;
    case 'table': return <TableNG data={frames[0]} {...{width, height}} structureRev={1} cellHeight={panel.options.cellHeight} />;
    case 'state-timeline': return <Timeline {...{frames, range, width}} />;
    case 'stat': return <Repeated {...{panel, frames, width, height}}>{({value, alignmentFactors, width, height, count}) =>
      <BigValue value={value.display} {...{theme, width, height, count, alignmentFactors}} colorMode={panel.options.colorMode} graphMode="none" textMode={panel.options.textMode} />}</Repeated>;
    case 'bargauge': return <Repeated {...{panel, frames, width, height}}>{({value, alignmentFactors, width, height, orientation}) =>
      <BarGauge value={value.display} field={value.field} display={value.view?.getFieldDisplayProcessor(value.colIndex)} {...{theme, width, height, orientation, alignmentFactors}}
        displayMode={panel.options.displayMode} showUnfilled valueDisplayMode="color" namePlacement="auto" />}</Repeated>;
    default: throw Error(`no component for panels of type ${panel.type}`);
  }
}

function Panel({panel, results, range}) {
  const [frames, setFrames] = useState(), size = panel.gridPos, unit = (WIDTH - GAP) / COLUMNS;
  useLayoutEffect(() => {
    const applied = transformDataFrame(panel.transformations ?? [], framesOf(panel, results, range), {interpolate: (text) => text}).subscribe((data) => {
      const ready = applyFieldOverrides({data, fieldConfig: panel.fieldConfig ?? {defaults: {}, overrides: []}, replaceVariables: (text) => text, theme, timeZone: 'utc'});
      cacheFieldDisplayNames(ready);
      setFrames(ready);
    });
    return () => applied.unsubscribe();
  }, []);
  const [width, height] = [size.w * unit - GAP, size.h * (UNIT + GAP) - GAP];
  const place = {position: 'absolute', left: GAP + size.x * unit, top: GAP + size.y * (UNIT + GAP), width, height};
  if (panel.type === 'row') return <div style={{...place, fontSize: 16, fontWeight: 500, padding: 4}} data-panel={panel.id} data-title={panel.title}>{panel.title}</div>;
  return <div style={place} data-panel={panel.id} data-title={panel.title}>{frames &&
    <PanelChrome title={panel.title} {...{width, height}}>{(width, height) => <Body {...{panel, frames, range, width, height}} />}</PanelChrome>}</div>;
}

const styles = <GlobalStyles isExtensionSidebarOpen={false} />;

// Components measure text when they are drawn, so the fonts come first.
window.draw = async (dashboard, results, range) => {
  const root = createRoot(document.getElementById('root'));
  root.render(<ThemeContext.Provider value={theme}>{styles}</ThemeContext.Provider>);
  await new Promise((resolve) => setTimeout(resolve));
  await Promise.all(['400', '500', 'italic 400'].map((face) => document.fonts.load(`${face} 14px Inter`)));
  const rows = Math.max(...dashboard.panels.map(({gridPos: {y, h}}) => y + h));
  root.render(<ThemeContext.Provider value={theme}>
    {styles}
    <div style={{position: 'relative', width: WIDTH, height: rows * (UNIT + GAP) + GAP, background: theme.colors.background.canvas}}>
      {dashboard.panels.map((panel) => <Panel key={panel.id} {...{panel, range}} results={results[panel.id] ?? {}} />)}
    </div>
  </ThemeContext.Provider>);
};
